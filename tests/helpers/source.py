"""attnlib's own source as facts: who imports whom, who spells what, how long things are, what is kept."""

import ast
from functools import cached_property
from pathlib import Path

import attnlib

ROOT = Path(attnlib.__file__).parent
# Not of the core. Of BESIDE, one names what callables take and passes nothing on, the other draws.
OUTSIDE = {
    "bench",
    "checkpoint_files",
    "convert",
    "finetune",
    "sizes",
    "reference",
    "integrations",
    "compat",
    "parallel",
}
BESIDE = {("internal", "words"), ("internal", "plots")}
KERNELS = "backends/_triton/kernels/"


def statements(body: list[ast.stmt]) -> int:
    """How many statements ``body`` has, those inside of others too, without docstrings."""
    found = [node for one in body for node in ast.walk(one) if isinstance(node, ast.stmt)]
    return len(found) - sum(
        isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant) and isinstance(x.value.value, str)
        for x in found
    )


class Source:
    """One file of the package: its path below attnlib, and what follows from its text."""

    def __init__(self, path: str, text: str):
        self.path, self.text, self.tree = path, text, ast.parse(text)

    @property
    def parts(self) -> tuple[str, ...]:
        """The module's name below attnlib, of a package with ``__init__``."""
        return tuple(self.path.removesuffix(".py").split("/"))

    @property
    def is_core(self) -> bool:
        return self.parts[0] not in OUTSIDE and self.parts not in BESIDE and "hopper" not in self.parts

    @cached_property
    def functions(self) -> list[ast.FunctionDef]:
        return [
            node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]

    @cached_property
    def words(self) -> frozenset[str]:
        """Every name, attribute, parameter, keyword and whole string of the code; ``x_ptr`` is ``x``.

        The keywords of torch's functions are torch's words: those where what is called is written
        ``torch.…``.
        """
        foreign = {
            keyword
            for call in ast.walk(self.tree)
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("torch.")
            for keyword in call.keywords
        }
        found = set()
        for node in ast.walk(self.tree):
            if node in foreign:
                continue
            for _, value in ast.iter_fields(node):
                each = value if isinstance(value, list) else [value]
                found.update(x.removesuffix("_ptr") for x in each if isinstance(x, str))
        return frozenset(found)

    @cached_property
    def statements(self) -> int:
        """How many statements the file has, docstrings aside."""
        return statements(self.tree.body)

    @cached_property
    def imports(self) -> list[tuple[str, ...]]:
        """Every import of attnlib, also within functions and for types, as the parts of a module's name below
        it.
        """
        package, found = self.parts[:-1], []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else ()
                module = (*base, *(node.module or "").split(".")) if node.module else base
                if not node.level:
                    if module[0] != "attnlib":
                        continue
                    module = module[1:]
                found += [(*module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                found += [
                    tuple(x.name.split(".")[1:]) for x in node.names if x.name.split(".")[0] == "attnlib"
                ]
        return found

    def modules(self) -> set[tuple[str, ...]]:
        """The modules that it imports: a name imported from a module stands for the module."""
        return {_module(name) for name in self.imports} - {self.parts}


def _module(name: tuple[str, ...]) -> tuple[str, ...]:
    for known in (name, name[:-1]):
        if known in MODULES:
            return known
        if (*known, "__init__") in MODULES:
            return (*known, "__init__")
    raise AssertionError(f"no module attnlib.{'.'.join(name)}")


def parameters(function: ast.FunctionDef) -> list[str]:
    """A function's parameters, but for ``self`` and ``cls``."""
    a = function.args
    names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x is not None]
    return [name for name in names if name not in ("self", "cls")]


def module_level(tree: ast.Module) -> list[ast.AST]:
    """The nodes of a module that are in no function and no class."""
    inside, level = [], list(ast.iter_child_nodes(tree))
    while level:
        node = level.pop()
        inside.append(node)
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            level += ast.iter_child_nodes(node)
    return inside


PACKAGE = [Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in sorted(ROOT.rglob("*.py"))]
MODULES = {source.parts for source in PACKAGE}
CORE = [source for source in PACKAGE if source.is_core]
BACKENDS = [source for source in PACKAGE if source.parts[0] == "backends"]
