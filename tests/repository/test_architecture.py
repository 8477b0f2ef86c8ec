"""The rooms of docs/tour.md and the arrows between them; what is kept beyond a call; what importing attnlib
costs.
"""

import ast
import os
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
import torch
from rooms import BACKENDS, FAMILIES, ORDER, ROOMS, VALUES
from source import PACKAGE, ROOT, Source
from source_state import holds, private_names, stores

import attnlib
from attnlib import CAUSAL, GroupedQueryAttention, Rope

DOORS = {("backends", "_triton", "__init__"), ("backends", "_torch", "__init__"), ("backends", "_reference")}
# The two stores of mutable state, compiled launches and calls that are prepared; which chip a device is; and
# which private functions of torch and Triton have passed their trials.
KEEPERS = (
    {"backends/_triton/launching/launch.py"},
    {"call/cache.py", "dispatch/select.py"},
    {"call/spec.py"},
    {"internal/probes.py"},
)
# The folders of modules that each have a test file of their name; of the root it is in tests/root.
TESTS = Path(__file__).resolve().parents[1]
MIRRORED = {"call", "dispatch", "cache", "layers", "masks", "tracing", "rope", "root"}
# Each behind a trial on first use, or a guard of what the name is needed for.
PRIVATE = {
    "internal/watched.py": "asks whether anybody follows operators",
    "internal/torch_questions.py": "tries what answers that",
    "backends/_triton/launching/direct.py": "asks for device and stream, to start a compiled kernel",
    "backends/_triton/decode/peers.py": "lets GPUs write into each other's memory; torch has no public name",
    "backends/_torch/fused.py": "calls ATen's fused CPU attention, whose backward has no public name",
    "backends/_torch/efficient.py": "calls ATen's memory-efficient attention, as SDPA returns no LSE",
}


def room_of(module: tuple[str, ...]) -> str:
    """The deepest room that a module is in."""
    return next(
        (room for n in range(len(module), 0, -1) if (room := "/".join(module[:n])) in ROOMS), module[0]
    )


def wrong_imports(source: Source) -> list[str]:
    """What a file imports and its room may not, or from inside another backend's or the kernels' room."""
    mine = room_of(source.parts)
    targets = [(target, room_of(target)) for target in source.modules()]
    wrong = [target for target, room in targets if room != mine and room not in ROOMS[mine]]
    inside = [
        target for target, room in targets if mine == "dispatch" and room in BACKENDS and target not in DOORS
    ]
    if source.parts[:2] == ("convert", "checkpoint"):  # folders know nothing of what is converted
        wrong += [target for target, _ in targets if target[0] == "convert" and target[1] != "checkpoint"]
    return sorted(".".join(target) for target in {*wrong, *inside})


@pytest.mark.parametrize("source", PACKAGE, ids=lambda x: x.path)
def test_a_file_imports_what_its_room_may(source):
    wrong = wrong_imports(source)
    assert not wrong, (
        f"{source.path} imports {wrong}; {room_of(source.parts)} may import {ROOMS[room_of(source.parts)]}"
    )


def test_every_arrow_between_rooms_points_down():
    for at, room in enumerate(ORDER):
        assert not ROOMS[room] & {*ORDER[: at + 1]}, f"{room}: an arrow that points up, or at itself"


def test_no_modules_import_each_other():
    TopologicalSorter(
        {x.parts: x.modules() for x in PACKAGE}
    ).prepare()  # raises and names the cycle, if there is one


def beside(sources: list[Source]) -> dict[tuple[str, ...], dict[str, set[str]]]:
    """For each folder, which of what lies in it, folders and files alike, imports which other."""
    found = defaultdict(lambda: defaultdict(set))
    for source in sources:
        for target in source.modules():
            common = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(source.parts, target, strict=False))
            )
            if common < min(len(source.parts), len(target)):
                found[source.parts[:common]][source.parts[common]].add(target[common])
    return found


@pytest.mark.parametrize("folder", sorted(beside(PACKAGE)), ids="/".join)
def test_no_folders_import_each_other(folder):
    TopologicalSorter(beside(PACKAGE)[folder]).prepare()


def test_planted_folders_that_import_each_other_are_found():
    one, other = (
        Source("layers/gqa.py", "from ..cache import pages"),
        Source("cache/pages.py", "from ..layers import mla"),
    )
    with pytest.raises(CycleError):
        TopologicalSorter(beside([one, other])[()]).prepare()


def hiding(source: Source) -> set[str]:
    """The names that the ``__init__`` of a folder takes from its files and that hide one of these."""
    inside = {
        x.parts[len(source.parts) - 1]
        for x in PACKAGE
        if x.parts[:-1][: len(source.parts) - 1] == source.parts[:-1]
    }
    taken = [x for x in ast.walk(source.tree) if isinstance(x, ast.ImportFrom) and x.module]
    return {name.asname or name.name for x in taken for name in x.names} & inside


@pytest.mark.parametrize("source", [x for x in PACKAGE if x.parts[-1] == "__init__"], ids=lambda x: x.path)
def test_a_folder_hides_none_of_its_files(source):
    assert not hiding(source), f"{source.path}: rename these, or what is in them"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("call/call.py", "from ..dispatch import select"),
        ("masks/band.py", "def f():\n    import attnlib.kv"),
        ("backends/_torch/tiles.py", "from .._triton import launch"),
        ("backends/_triton/kernels/band.py", "from ..dense.tables import LaunchConfig"),
        ("dispatch/select.py", "from ..backends._torch.tiles import Part"),
        ("layers/gqa.py", "from ..dispatch.storage import write_cache"),
        ("convert/checkpoint/plan.py", "from .. import heads"),
        ("convert/command.py", "from ..finetune import run"),
    ],
)
def test_a_planted_import_is_found(path, text):
    assert len(wrong_imports(Source(path, text))) == 1


def climbs(rooms: list[str]) -> int:
    """How often one goes up on the way through these rooms."""
    places = [ORDER.index(room) for room in rooms]
    return sum(after < before for before, after in pairwise(places))


def test_a_training_call_climbs_at_most_once():
    """By the rooms in which its functions first run; values, which every room uses, aside."""
    layer = GroupedQueryAttention(hidden_size=32, num_heads=4, num_kv_heads=2, mask=CAUSAL, rope=Rope(8))
    x, path = torch.randn(2, 9, 32, requires_grad=True), []

    def enter(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(f"{ROOT}{os.sep}"):
            room = room_of(Source(os.path.relpath(name, ROOT).replace(os.sep, "/"), "").parts)
            if room not in (*VALUES, *path):
                path.append(room)

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        layer(x).sum().backward()
    finally:
        sys.setprofile(before)
    assert {"layers", "dispatch/run", "call", "dispatch", "backends/_torch", "backends"} <= {*path}
    assert climbs(path) <= 1, f"q's way climbs more than once: {' -> '.join(path)}"
    assert climbs(["layers", "call", "functional", "backends", "dispatch"]) == 2


def test_what_is_kept_beyond_a_call_is_two_stores():
    found = {x.path: kept for x in PACKAGE if (kept := stores(x))}
    wrong = [
        f"{path} keeps {kept}" for path, kept in found.items() if not any(path in files for files in KEEPERS)
    ]
    for files in KEEPERS:
        count = sum(len(found.get(path, ())) for path in files)
        wrong += [] if count == 1 else [f"{' or '.join(sorted(files))} has {count} stores, not 1"]
    assert not wrong, f"what is remembered belongs into one of the two stores: {'; '.join(wrong)}"


@pytest.mark.parametrize(
    "text",
    [
        "KNOWN = {}",
        "from collections import deque\nKNOWN = deque()",
        "from types import MappingProxyType\nKNOWN = MappingProxyType({1: []})",
        "from functools import lru_cache\n@lru_cache\ndef f(): pass",
        "from functools import cache\nf = cache(print)",
        "def f(known=[]): pass",
        "def f(): pass\nf.known = {}",
        "def g():\n    known = {}\n    return lambda: known\nf = g()",
        "class A:\n    known = set()",
        "class A:\n    def __init__(self):\n        self._known = {}\na = A()",
        "class A:\n    __slots__ = ('known',)\n    def __init__(self):\n        self.known = []\na = A()",
    ],
)
def test_a_planted_store_is_found(text):
    names = {"__name__": "attnlib.planted"}
    exec(text, names)
    assert any(
        holds(value)
        for name, value in names.items()
        if name[:2] != "__" and name not in ("cache", "deque", "g")
    )


def test_plain_values_are_no_stores():
    assert not any(map(holds, (3, "x", (1, 2), CAUSAL, frozenset({1}), climbs, Source, torch, os)))


def test_only_these_files_name_private_apis():
    wrong = [place for x in PACKAGE if x.path not in PRIVATE for place in private_names(x)]
    assert not wrong, f"a private API belongs into {' or '.join(PRIVATE)}: {wrong}"
    assert all(private_names(Source(x, (ROOT / x).read_text())) for x in PRIVATE), (
        "PRIVATE lists a file without need"
    )


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._C._cuda_getDevice()",
        "import torch\ntorch.ops.aten._softmax(x)",
        "import torch\ngetattr(torch.ops.attnlib, name).default._schema",
        "import torch\ngetattr(torch, '_foreach_add')",
        "from torch import _VF",
        "from torch._subclasses.fake_tensor import is_fake",
        "def f():\n    from triton.compiler import _impl",
        "from torch.autograd import forward_ad as ad\nad._current_level",
    ],
)
def test_a_planted_private_api_is_found(text):
    assert private_names(Source("call/call.py", text))


def test_public_names_are_not_private():
    assert not private_names(
        Source("call/call.py", "import torch\ntorch.__version__\nself._x\n_f(torch.ops)\nfrom . import _a")
    )


def test_nothing_of_a_test_is_shipped():
    for source in PACKAGE:
        for node in ast.walk(source.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = {name.split(".")[0] for name in names} & {"unittest", "pytest", "hypothesis"}
            assert not found, f"{source.path} imports {found}"


def file_that_tests(source: Source) -> Path | None:
    """The file that tests this module; None for a folder's ``__init__``, and where several share a file."""
    *folders, name = source.parts
    folder = "/".join(folders) or "root"
    return (
        None
        if name == "__init__" or folder.partition("/")[0] not in MIRRORED
        else TESTS / folder / f"test_{name.strip('_')}.py"
    )


def test_every_module_has_a_test_file_of_its_name():
    files = [file for source in PACKAGE if (file := file_that_tests(source))]
    files += [TESTS / f"kernels/hopper/test_{family}.py" for family in FAMILIES]
    missing = [file.relative_to(TESTS).as_posix() for file in files if not file.exists()]
    assert not missing, f"write {missing}, or move tests there"
    assert {file.relative_to(TESTS).parts[0] for file in files} == {*MIRRORED, "kernels"}


def test_nothing_lies_loose_among_the_folders_of_tests():
    assert {file.name for file in TESTS.iterdir() if file.is_file()} == {"README.md", "conftest.py"}
    helping = {file.stem for file in (TESTS / "helpers").iterdir() if file.stem.startswith("test_")}
    assert not helping, f"no tests among the helpers: {helping}"


def test_the_exports():
    assert sorted(attnlib.__all__) == sorted(
        [
            "CAUSAL",
            "QUERY_OFFSET",
            "FLOP_FORMULAS",
            "FULL",
            "CHECKPOINT_SAVE_OPS",
            "Angles",
            "Axes",
            "CacheFullError",
            "Explanation",
            "Fp8Inputs",
            "Gate",
            "GroupedQueryAttention",
            "Indexer",
            "SequenceHandle",
            "KVCache",
            "KVLayout",
            "KVView",
            "LayerCache",
            "LayoutWarning",
            "Mask",
            "MaskFunction",
            "MultiHeadAttention",
            "MultiHeadLatentAttention",
            "MultiQueryAttention",
            "Rope",
            "ScoreFunction",
            "SlowPathWarning",
            "QueryTemperature",
            "TraceError",
            "attention",
            "attention_maxima",
            "attention_weights",
            "attention_with_lse",
            "cached_attention",
            "cached_attention_with_lse",
            "explain",
            "load_pretrained",
            "mask_mod",
            "merge_states",
            "mrope_positions",
            "quantize_fp8",
            "rotate",
            "score_mod",
            "shared_angles",
            "sliding",
            "varlen_attention",
            "varlen_attention_with_lse",
        ]
    )
    assert all(hasattr(attnlib, name) for name in attnlib.__all__)


def test_importing_is_light():
    """No heavy module comes along, no device is asked, and torch's own import time is all but the whole."""
    code = """
import gc, sys, time
times = [time.process_time()]  # not wall time, which other work on the machine stretches
import torch
before = set(sys.modules)
gc.disable()  # a collection of all that torch made takes as long as the import, and may fall into it
times.append(time.process_time())
import attnlib
times.append(time.process_time())
print((times[2] - times[1]) / (times[1] - times[0]))
heavy = {"triton", "transformers", "matplotlib", "einops", "tqdm", "safetensors"}
assert not {name.split(".")[0] for name in set(sys.modules) - before} & heavy
assert not torch.cuda.is_initialized()
"""
    kept = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }  # compiled once
    options = {"capture_output": True, "text": True, "check": True, "env": kept}
    runs = (subprocess.run([sys.executable, "-c", code], **options) for _ in range(3))
    assert any(float(run.stdout) < 0.1 for run in runs)  # 0.05 to 0.06, on a busy machine too
