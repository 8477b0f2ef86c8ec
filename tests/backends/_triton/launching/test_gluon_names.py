"""The names of Gluon in Hopper kernels: each is probed, and each that a Triton lacks is named."""

import ast
import builtins
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnlib.backends._triton.launching import gluon_names
from attnlib.backends._triton.launching.gluon_names import GLUON, HOPPER, NAMES, missing_names

pytest.importorskip("triton")
KERNELS = sorted((Path(gluon_names.__file__).parents[1] / "kernels" / "hopper").rglob("*.py"))
PROBED = "triton.experimental.", "triton.language.extra."  # the rest the generic kernels use too
METHODS = f"{GLUON}.shared_memory_descriptor", f"{GLUON}.tensor"


def listed() -> set[str]:
    """All that is probed: names, and keyword arguments behind theirs."""
    found = set()
    for of, names in NAMES.items():
        for word in names.split():
            name, _, keywords = word.removesuffix(")").partition("(")
            found |= {f"{of}.{name}", *(f"{of}.{name}({x}=)" for x in keywords.split(",") if x)}
    return found


def used(source: str) -> Iterator[str]:
    """The names of Triton in a module of kernels, its keyword arguments behind theirs, and methods as
    ``.name``.
    """
    tree, imported = ast.parse(source), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.startswith("triton"):
            imported |= {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}
        elif isinstance(node, ast.Import):
            imported |= {x.asname: x.name for x in node.names if x.asname}
    yield from imported.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node, imported)):
            yield name
        elif isinstance(node, ast.Call) and (name := dotted(node.func, imported)):
            yield from (f"{name}({x.arg}=)" for x in node.keywords)
        elif isinstance(node, ast.FunctionDef) and any(
            "gluon.jit" in ast.unparse(x) for x in node.decorator_list
        ):
            calls = (x.func for x in ast.walk(node) if isinstance(x, ast.Call))
            yield from (
                f".{x.attr}" for x in calls if isinstance(x, ast.Attribute) and not dotted(x, imported)
            )


def dotted(node: ast.AST, imported: dict[str, str]) -> str | None:
    """The full name of an expression that begins with an imported one."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute) and (of := dotted(node.value, imported)):
        return f"{of}.{node.attr}"
    return None


@pytest.mark.parametrize("path", KERNELS, ids=lambda x: x.stem)
def test_every_name_in_the_kernels_is_probed(path):
    probed = listed()
    for name in used(path.read_text()):
        if name.startswith("."):
            assert {f"{of}{name}" for of in METHODS} & probed, f"{path.name} calls {name}(); add it to NAMES"
        elif name.startswith(PROBED) and name not in NAMES:
            assert name in probed, f"{path.name} uses {name}; add it to NAMES"


def test_nothing_else_is_probed():
    found = {name for path in KERNELS for name in used(path.read_text())}
    methods = {f"{of}{name}" for of in METHODS for name in found if name.startswith(".")}
    descriptor = "triton.experimental.gluon.nvidia.hopper.TensorDescriptor"  # which launches make
    assert listed() - found - methods == {descriptor}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from triton.experimental.gluon import language as gl\nx = gl.nothing(1)", f"{GLUON}.nothing"),
        (
            "from triton.experimental.gluon import language as gl\ngl.store(1, cache=2)",
            f"{GLUON}.store(cache=)",
        ),
        (f"from {HOPPER} import tma\nx = tma.async_gather", f"{HOPPER}.tma.async_gather"),
        ("@gluon.jit\ndef f(x):\n    return x.y.turned(1)", ".turned"),
    ],
)
def test_a_planted_name_is_found(source, name):
    assert name in used(source)
    assert name not in listed()


def test_this_triton_has_them_all():
    assert missing_names() == []


@pytest.mark.parametrize(
    ("of", "name", "missing"),
    [
        (GLUON, "warp_specialize", f"{GLUON}.warp_specialize"),
        (f"{GLUON}.shared_memory_descriptor", "permute", f"{GLUON}.shared_memory_descriptor.permute"),
        (f"{HOPPER}.mbarrier", "expect", f"{HOPPER}.mbarrier.expect"),
    ],
)
def test_a_name_that_is_gone_is_told(monkeypatch, of, name, missing):
    monkeypatch.delattr(f"{of}.{name}")
    assert missing_names() == [missing]


def test_a_keyword_that_is_gone_is_told(monkeypatch):
    monkeypatch.setattr(f"{HOPPER}.warpgroup_mma", lambda a, b, acc, *, use_acc=True: acc)
    assert missing_names() == [f"{HOPPER}.warpgroup_mma(is_async=)"]
    monkeypatch.setattr(f"{HOPPER}.warpgroup_mma", lambda *a, **named: None)
    assert missing_names() == []


def test_no_name_of_several_is_told(monkeypatch):
    tma = __import__(f"{HOPPER}.tma", fromlist=["tma"])
    for name in ("async_load", "async_copy_global_to_shared"):
        monkeypatch.delattr(tma, name, raising=False)
    monkeypatch.delitem(sys.modules, "attnlib.backends._triton.kernels.hopper.primitives", raising=False)
    assert missing_names() == [f"{HOPPER}.tma has none of async_load, async_copy_global_to_shared"]


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_nothing_is_raised_where_triton_cannot_be_imported(monkeypatch, error):
    real = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("triton"):
            raise error("broken")
        return real(name, *rest)

    for name in [x for x in sys.modules if x.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr("importlib.import_module", refuse)
    assert f"{GLUON}.warp_specialize" in missing_names()
