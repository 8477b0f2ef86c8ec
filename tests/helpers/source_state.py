"""What the package keeps beyond a call, and which private APIs of torch and Triton it names."""

import ast
import importlib
import types
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet

from source import Source, module_level

CONTAINERS = (MutableMapping, MutableSequence, MutableSet)


def stores(source: Source) -> set[str]:
    """The names of a module, imports aside, whose values could remember something, and caches within its
    functions.

    The module is imported and looked at, so that it does not matter how a store is made. A tensor is none.
    """
    module = importlib.import_module(".".join(("attnlib", *source.parts)).removesuffix(".__init__"))
    level = module_level(source.tree)
    imported = {
        x.asname or x.name
        for node in level
        if isinstance(node, ast.Import | ast.ImportFrom)
        for x in node.names
    }
    own = {name: value for name, value in vars(module).items() if name not in imported and name[:2] != "__"}
    return {name for name, value in own.items() if holds(value)} | rebound(source)


def holds(value: object, depth: int = 4) -> bool:
    """Whether a value is a mutable container or a cache, or has one in itself."""
    if isinstance(value, CONTAINERS) or hasattr(value, "cache_info"):
        return True
    of_ours = type(value).__module__.partition(".")[0] == "attnlib"
    inner = []
    if isinstance(value, tuple | frozenset):
        inner = list(value)
    elif isinstance(value, types.MappingProxyType):
        inner = list(value.values())
    elif isinstance(value, staticmethod | classmethod):
        inner = [value.__func__]
    elif isinstance(value, types.FunctionType):
        cells = [x.cell_contents for x in value.__closure__ or ()]
        inner = [
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
            *vars(value).values(),
            *cells,
        ]
    elif isinstance(value, type) and value.__module__.partition(".")[0] == "attnlib":
        inner = [x for name, x in vars(value).items() if not name.startswith("_")]
    elif of_ours and not isinstance(value, type):
        inner = [getattr(value, name, None) for name in (*getattr(value, "__dict__", ()), *_slots(value))]
    return depth > 0 and any(holds(x, depth - 1) for x in inner)


def _slots(value: object) -> list[str]:
    return [name for owner in type(value).__mro__ for name in getattr(owner, "__slots__", ())]


def rebound(source: Source) -> set[str]:
    """Names that a function rebinds in its module, and functions within functions that functools
    remembers.
    """
    top = {node for node in module_level(source.tree) if isinstance(node, ast.FunctionDef)}
    found = {name for node in ast.walk(source.tree) if isinstance(node, ast.Global) for name in node.names}
    for function in source.functions:
        makers = {ast.unparse(x).partition("(")[0].rpartition(".")[2] for x in function.decorator_list}
        if function not in top and makers & {"cache", "lru_cache"}:
            found.add(function.name)
    return found


def private_names(source: Source) -> list[str]:
    """Where a file names something of torch or Triton that begins with an underscore, ``getattr`` included.

    What is told by names alone: an attribute of torch's, or of what a call of torch's returns. ``x._version``
    of a tensor that came as an argument stays unseen.
    """
    return sorted(_private(source))


def _private(source: Source) -> Iterator[str]:
    foreign = set()
    for node in ast.walk(source.tree):
        names = []
        if isinstance(node, ast.Import):
            names = [x.name for x in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{x.name}" for x in node.names]
        theirs = [
            x for x, name in zip(getattr(node, "names", ()), names, strict=bool(names)) if _is_theirs(name)
        ]
        foreign.update((x.asname or x.name).partition(".")[0] for x in theirs)
        hidden = [name for name in names if _is_theirs(name) and any(map(_is_private, name.split(".")))]
        yield from (f"{source.path}:{node.lineno}: {name}" for name in hidden)
    for node in ast.walk(source.tree):
        word = None
        if isinstance(node, ast.Attribute) and _root(node) in foreign:
            word = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            owner, name = node.args[:2]
            word = name.value if isinstance(name, ast.Constant) and _root(owner) in foreign else None
        if word is not None and _is_private(word):
            yield f"{source.path}:{node.lineno}: {ast.unparse(node)}"


def _root(node: ast.AST) -> str | None:
    """The name that a chain of attributes, indices and calls begins with."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Call):
            node = node.args[0] if ast.unparse(node.func) == "getattr" else node.func
        elif isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        else:
            return None
    return node.id


def _is_theirs(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "triton")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
