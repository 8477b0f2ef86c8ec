"""The rooms of docs/tour.md and the arrows between them; what importing attnlib costs; what it exports."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import attnlib

ROOT = Path(attnlib.__file__).parent
VALUES = {"checks", "kv", "mask", "merge", "philox", "rope", "scaling"}
ALLOWED = {
    "__init__": {"mask", "merge", "rope", "kv", "cache", "layers", "functional", "dispatch"},
    "__main__": {"bench", "convert", "sizes", "dispatch"},
    "bench": set(attnlib.__all__),  # `from .. import`, as users do
    "convert": {"layers", "cache", "functional", "sizes", *VALUES},
    "layers": {"functional", "cache", *VALUES},
    "functional": {"call", "spec", "dispatch", "prepared", *VALUES},
    "storage": {"dispatch", *VALUES},
    "dispatch": {"backends", "call", "prepared", "spec"},
    "prepared": {"call", "watched", *VALUES},
    "watched": set(),
    "call": {"spec", *VALUES},
    "spec": {"call", "watched", *VALUES},  # call only to name its type
    "cache": {"storage", *VALUES},
    "sizes": VALUES,
    "backends": {"call", "spec", "prepared", "watched", *VALUES},
    "reference": set(),
    **dict.fromkeys(VALUES, VALUES),
}
BACKENDS = {"_reference", "_torch", "_triton"}  # what is beside them in backends/ is for all of them
FILES = sorted(ROOT.rglob("*.py"))


def imports_of(path: Path) -> list[tuple[str, ...]]:
    """Every import of attnlib in a file, as the parts of an absolute module path below attnlib."""
    package = path.relative_to(ROOT).parent.parts
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            module = (*base, *(node.module.split(".") if node.module else ()))
            found += [module] if node.module else [(*module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [tuple(name.split("."))[1:] for name in names if name and name.split(".")[0] == "attnlib"]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_what_its_room_may(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    for target in imports_of(path):
        if target[0] != parts[0]:
            defined = parts[:2] == ("backends", "_reference") and target[0] == "reference"
            assert defined or target[0] in ALLOWED[parts[0]], f"{parts[0]} may not import {'.'.join(target)}"


@pytest.mark.parametrize("path", [x for x in FILES if "backends" in x.parts], ids=lambda x: str(x.relative_to(ROOT)))
def test_a_backend_knows_no_other(path):
    mine = path.relative_to(ROOT / "backends").with_suffix("").parts[0]
    others = BACKENDS - {mine}
    for target in imports_of(path):
        assert target[0] != "backends" or target[1] not in others, f"{mine} imports {'.'.join(target)}"


def test_kernels_import_kernels_alone():
    room = ("backends", "_triton", "kernels")
    for path in (ROOT / "backends/_triton/kernels").glob("*.py"):
        others = [name for name in imports_of(path) if name[:3] != room]
        assert not others, f"{path.name} imports {others}"


def test_only_dispatch_names_backends():
    """Nothing outside a backend's room names what is inside it."""
    for path in FILES:
        if "backends" in path.relative_to(ROOT).parts:
            continue
        named = [name for name in imports_of(path) if name[0] == "backends"]
        assert all(path.stem == "dispatch" and name == ("backends",) for name in named), f"{path.name} imports {named}"


def test_folders_know_nothing_of_what_is_converted():
    for path in (ROOT / "convert/checkpoint").glob("*.py"):
        others = [name for name in imports_of(path) if name[0] == "convert" and name[1] != "checkpoint"]
        assert not others, f"{path.name} imports {others}"


def test_nothing_of_a_test_is_shipped():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = {name.split(".")[0] for name in names} & {"unittest", "pytest", "hypothesis"}
            assert not found, f"{path.relative_to(ROOT)} imports {found}"


def test_the_benchmark_stays_small():
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "bench").glob("*.py")) <= 1500


def test_only_the_cache_stores():
    users = {path.relative_to(ROOT).parts[0] for path in FILES if ("storage",) in [x[:1] for x in imports_of(path)]}
    assert users == {"cache"}


def test_the_exports():
    assert sorted(attnlib.__all__) == sorted(
        [
            "CAUSAL",
            "FLOP_FORMULAS",
            "FULL",
            "SAVE_OPS",
            "Angles",
            "CacheFullError",
            "Explanation",
            "GroupedQueryAttention",
            "KVCache",
            "KVLayout",
            "KVView",
            "Mask",
            "MultiHeadAttention",
            "MultiHeadLatentAttention",
            "MultiQueryAttention",
            "Rope",
            "SlowPathWarning",
            "attention",
            "attention_with_lse",
            "cached_attention",
            "cached_attention_with_lse",
            "explain",
            "merge_states",
            "rotate",
            "sliding",
            "varlen_attention",
            "varlen_attention_with_lse",
        ]
    )
    assert all(hasattr(attnlib, name) for name in attnlib.__all__)


def test_importing_is_light():
    """No heavy module comes along, no device is asked, and torch's own import time is all but the whole."""
    code = """
import sys, time, torch
before = set(sys.modules)
start = time.process_time()  # not wall time, which other work on the machine stretches
import attnlib
print(time.process_time() - start)
heavy = {"triton", "transformers", "matplotlib", "einops", "tqdm", "safetensors"}
assert not {name.split(".")[0] for name in set(sys.modules) - before} & heavy
assert not torch.cuda.is_initialized()
"""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # compiled once
    options = {"capture_output": True, "text": True, "check": True, "env": kept}
    runs = [subprocess.run([sys.executable, "-c", code], **options) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.15


def test_no_module_holds_mutable_state():
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict | ast.List | ast.Set):
                names = node.targets if isinstance(node, ast.Assign) else [node.target]
                assert [name.id for name in names] == ["__all__"], f"{path.name}: {ast.unparse(node)[:60]}"


# What is remembered beyond a call: plans of launches by all that decides them, what a device is, and prepared calls.
REMEMBERED = {
    "spec.py": {"_known_arch"},
    "dispatch.py": {"PREPARED"},
    "backends/_triton/plans.py": {"forward", "backward"},
    "backends/_triton/cached.py": {"cached_plan"},
    "backends/_triton/schedule.py": {"processors", "_schedule_plan"},
    "backends/_triton/writes.py": {"plan"},
}


def test_what_is_remembered_is_listed():
    stores = ("lru_cache", "cache", "PreparedCalls", "WeakKeyDictionary", "WeakValueDictionary", "defaultdict")
    found = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            names = [node.name] if isinstance(node, ast.FunctionDef) else []
            makers = node.decorator_list if names else [getattr(node, "value", None)]
            if isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            makers = {ast.unparse(maker).partition("(")[0].rpartition(".")[2] for maker in makers if maker is not None}
            if names and makers & {*stores}:
                found.setdefault(str(path.relative_to(ROOT)), set()).update(names)
    assert found == REMEMBERED
