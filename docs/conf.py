"""Sphinx configuration that builds these pages as a site, by ``make docs``.

Nothing is downloaded, and a warning is an error.
"""

import os
import sys
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from sphinx import addnodes

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS / "site")]

import attnlib  # noqa: E402

project, release = "attnlib", attnlib.__version__
project_copyright = "the authors of attnlib, Apache-2.0"
extensions = [
    *("myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"),
    *("sphinx_copybutton", "sphinx_design"),
    *("arguments", "mathml", "search"),  # in docs/site
]
nitpicky = True  # an unresolved name in a docstring is a warning, too
highlight_language = "none"  # for code blocks without a language
html_theme, html_title = "furo", f"attnlib {release}"
html_static_path, html_css_files, templates_path = ["site/static"], ["site.css"], ["site/templates"]
html_math_renderer = "mathml"
html_search_scorer = str(DOCS / "site/scorer.js")
html_copy_source = html_show_sourcelink = False

copybutton_prompt_text, copybutton_prompt_is_regexp = (
    r">>> |\.\.\. |\$ ",
    True,
)  # the button does not copy prompts

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4  # heading anchors as code forges generate them
autodoc_class_signature = "mixed"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints, autodoc_typehints_description_target = "description", "all"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False

exclude_patterns = ["compiled.md"]  # measurements for changes to kernels, not for users

# Files outside docs/ that have a page of their own; other files get a page of source.
STANDING_FOR = {
    "README.md": "index.html",
    "CHANGELOG.md": "changelog.html",
    "CONTRIBUTING.md": "contributing.html",
}


def url_of(path: Path) -> str:
    """Return the site's URL of a file or folder of the repository, relative to the site's root."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return "internals.html#files"
    if path.suffix == ".md" and path.is_relative_to(DOCS):
        return path.relative_to(DOCS).with_suffix(".html").as_posix()
    return STANDING_FOR.get(name, f"source/{name}.html")


def lead_out(app, doctree) -> None:
    """Point links to files that are not pages to their source on the site, as a code forge shows the file."""
    page = app.env.docname
    links = [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]
    for node in (node for node in links if node.get("reftype") == "myst" and not node.get("refdomain")):
        target, _, anchor = node["reftarget"].partition("#")
        # A page may include a file of the root, whose links are relative to the root.
        tried = [(folder / target).resolve() for folder in ((DOCS / page).parent, ROOT)]
        found = next((path for path in tried if path.exists()), None)
        if found is None or not target or not found.is_relative_to(ROOT):
            continue  # myst warns about the broken link
        url = url_of(found)
        if url.startswith("source/"):
            app.env.attnlib_sources = {*getattr(app.env, "attnlib_sources", ()), found}
        refuri = os.path.relpath(url, os.path.dirname(page) or ".") + (f"#{anchor}" if anchor else "")
        node.replace_self(nodes.reference("", "", *node.children, refuri=refuri, internal=True))


def source_pages(app):
    """Yield a page of source for each file that a page links to."""
    for path in sorted(getattr(app.env, "attnlib_sources", ())):
        name = path.relative_to(ROOT).as_posix()
        code = highlight(path.read_text(), get_lexer_for_filename(name), HtmlFormatter(cssclass="highlight"))
        yield f"source/{name}", {"title": name, "body": f"<h1>{name}</h1>\n{code}"}, "page.html"


def public_type(app, env, node, contnode):
    """Link types in signatures to their public name.

    Types of other libraries and internal types stay plain text.
    """
    if node.get("refdomain") != "py" or "refwarn" in node:  # names in docstrings must resolve
        return None
    entry = "attnlib." + node["reftarget"].rpartition(".")[2]
    found = env.domains["py"].objects.get(entry) if node["reftarget"].startswith("attnlib.") else None
    if found is None:
        return contnode
    uri = app.builder.get_relative_uri(node["refdoc"], found.docname) + f"#{found.node_id}"
    return nodes.reference("", "", contnode, refuri=uri, internal=True, reftitle=entry)


def setup(app) -> None:
    app.connect("doctree-read", lead_out, priority=400)  # before Sphinx collects downloads
    app.connect("html-collect-pages", source_pages)
    app.connect("missing-reference", public_type)
