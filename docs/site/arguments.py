"""Sphinx extension: list the arguments beside each function, with their types and defaults.

Sphinx adds the types. This extension adds each default, and describes the arguments that a docstring does not
describe. Such a description is a row of a table of the page, or comes from an earlier function on the page.
On the site the lists replace the tables. A code forge shows the tables.
"""

import inspect
import re
from collections.abc import Callable, Mapping

TABLES = re.compile(r"^<!-- arguments -->\n(.*?)^<!-- end of arguments -->\n", re.MULTILINE | re.DOTALL)
ARGS = re.compile(r"^Args:\n((?:(?: .*)?\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+): (.*\n(?:(?:     .*)?\n)*)", re.MULTILINE)
SECTION = re.compile(r"^(Raises|Returns|Yields):$", re.MULTILINE)
EXAMPLE = re.compile(r"^>>> ", re.MULTILINE)
LINK = re.compile(r"\[([^]]+)\]\((\S+?)\.md(#[^)]+)?\)")
VALUE = re.compile(r"^\.\. autoclass:: (?:\w+\.)*(\w+)\(\)$", re.MULTILINE)

Descriptions = dict[str, str]  # by argument


def restructured(text: str) -> str:
    """Convert the inline Markdown of a table cell to reStructuredText.

    >>> restructured("a [`Rope`](rope.md), or `None`")
    'a `Rope <rope.html>`__, or ``None``'
    """
    pieces, end = [], 0
    for link in LINK.finditer(text):
        label, page, anchor = link.groups(default="")
        target = f"`{label.replace('`', '')} <{page}.html{anchor}>`__"
        pieces += [text[end : link.start()].replace("`", "``"), target]
        end = link.end()
    return "".join([*pieces, text[end:].replace("`", "``")])


def tables_of(page: str) -> list[Descriptions]:
    """Return the tables of arguments of a page.

    If the last column is "function", a row is only for these functions, and its keys are such as
    ``documents.numbers``.
    """
    tables = []
    for lines in re.findall(r"(?:^\|.*\n)+", "\n".join(TABLES.findall(page)), re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines.splitlines())
        table = {}
        for names, *cells in rows:
            functions = re.findall(r"\w+", cells.pop()) if head[-1] == "function" else []
            text = restructured("; ".join(cells))
            for name in re.findall(r"\w+", names):
                table |= {f"{function}.{name}": text for function in functions} or {name: text}
        tables.append(table)
    return tables


def described_in(docstring: str) -> Descriptions:
    """Return the Args section of a docstring.

    >>> described_in("Rotate.\\n\\nArgs:\\n    x: a tensor.\\n\\nRaises:\\n    ValueError: x.\\n")
    {'x': 'a tensor.\\n\\n'}
    """
    section = ARGS.search(docstring)
    return dict(ENTRY.findall(section[1])) if section else {}


def descriptions(function: Callable, *sources: Descriptions) -> Descriptions:
    """Return the description of each argument, from the first source that has one; else ''."""
    names = inspect.signature(function).parameters
    keys = {name: (f"{function.__name__}.{name}", name) for name in names}
    return {
        name: next((source[key] for source in sources for key in keys[name] if key in source), "")
        for name in names
    }


def best_first(tables: list[Descriptions], function: Callable) -> list[Descriptions]:
    """Return the tables, from the one that describes the most arguments of the function."""
    names = inspect.signature(function).parameters.keys()
    return sorted(tables, key=lambda table: -len(names & table.keys()))


def with_arguments(docstring: str, function: Callable, described: Mapping[str, str]) -> str:
    """Return the docstring with an Args section of all described arguments, in order, with their defaults."""
    entries = ""
    for name, parameter in inspect.signature(function).parameters.items():
        sentences = [described[name].strip().rstrip(".")] if described[name] else []
        if parameter.default is not parameter.empty:
            sentences.append(f"Default: ``{parameter.default!r}``")
        entries += f"    {name}: {'. '.join(sentences)}.\n" if sentences else ""
    if not entries:
        return docstring
    docstring = ARGS.sub("", docstring)
    after = SECTION.search(docstring) or EXAMPLE.search(docstring)
    at = after.start() if after else len(docstring)
    return f"{docstring[:at].rstrip()}\n\nArgs:\n{entries}\n{docstring[at:]}"


def drop_tables(app, docname: str, source: list[str]) -> None:
    """Keep the tables of a page for its functions, and leave them out of the page."""
    page = app.env.current_document
    page["argument_tables"] = tables_of(source[0])
    page["values"] = VALUE.findall(source[0])  # classes that users do not construct
    source[0] = TABLES.sub("", source[0])


def list_arguments(app, what: str, name: str, x: object, options, lines: list[str]) -> None:
    """Complete the Args section of the docstring of a function, method or class."""
    from sphinx.util.inspect import signature  # here, because tests read this file without Sphinx
    from sphinx.util.typing import stringify_annotation

    if what not in ("function", "method", "class") or (inspect.isclass(x) and issubclass(x, BaseException)):
        return
    page = app.env.current_document
    if what == "class" and name.rpartition(".")[2] in page.get("values", ()):
        page.autodoc_annotations.pop(name, None)
        return
    if what == "class" and x.__init__ is not object.__init__:
        _, *parameters = signature(x.__init__).parameters.values()
        page.autodoc_annotations[name] = {  # Sphinx would take the types of attributes of the same names
            parameter.name: stringify_annotation(parameter.annotation, "smart") for parameter in parameters
        }
    docstring = "\n".join(lines) + "\n"
    own, tables = described_in(docstring), best_first(page.get("argument_tables", []), x)
    earlier = page.setdefault(f"described by a {what}", {}) if what != "method" else {}
    bases = x.__mro__[1:-1] if inspect.isclass(x) else ()
    inherited = [described_in(inspect.getdoc(base) or "") for base in bases]
    sources = own, *inherited, *tables[:1], earlier, *tables[1:]
    lines[:] = with_arguments(docstring, x, descriptions(x, *sources)).splitlines()
    earlier |= own


def setup(app) -> dict[str, bool]:
    """Connect to Sphinx, before napoleon reads the Args sections (priority 500)."""
    app.connect("source-read", drop_tables)
    app.connect("autodoc-process-docstring", list_arguments, priority=400)
    return {"parallel_read_safe": True}
