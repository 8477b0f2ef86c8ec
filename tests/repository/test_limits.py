"""How far one option is spread, how values are read, and how long things may be: numbers that keep changes
local.
"""

import ast
import re

import pytest
from source import BACKENDS, CORE, KERNELS, PACKAGE, Source, parameters, statements
from source_values import Values, reads_by_place

SCORE_OPTIONS = ("softcap", "alibi_slopes", "sinks")
MASK_FIELDS = ("left", "right", "prefix")
LIKE_FORWARD = {"forward", "weights", "maxima"}  # methods of layers with the arguments of forward
DESCALES = ("q_descale", "k_descale", "v_descale")
# Besides attention, one public function and one file of kernels recompute scores; one kernel makes descales.
# Four more are for selected keys: of tensors, of caches, for gradients, and to sort their lists.
FILES_OF_A_WORD = (
    dict.fromkeys(SCORE_OPTIONS, 15) | dict.fromkeys(MASK_FIELDS, 14) | dict.fromkeys(DESCALES, 10)
)
DOORS = {"attention", "varlen_attention", "cached_attention"}
RECOMPUTED = {"attention_weights", "attention_maxima"}
PUBLIC = {*DOORS, *(f"{name}_with_lse" for name in DOORS)}
LINES = 450  # of a file
STATEMENTS, IN_KERNELS = 35, 86  # of a function, of one that a kernel runs
# Ranks that share a cache, what they exchange, and modules that hold either.
SHARDING = re.compile(
    r"Ranks|RankExchange|PeerMemory|peer_memory|\w+_own_heads|Sharded\w+|Sharding|([\w.]+\.)?sharded(_heads)?(\.\w+)*"
)
VALUES = Values(CORE)
# torch gives and takes flat lists; their order is written in the first, and the second is what torch calls.
IN_ORDER = ("backends/operators.py", "backends/autograd.py")


@pytest.mark.parametrize("word", FILES_OF_A_WORD)
def test_an_option_is_spelled_in_few_files(word):
    files = [source.path for source in CORE if word in source.words]
    most = FILES_OF_A_WORD[word]
    assert len(files) <= most, (
        f"{word} is spelled in {len(files)} core files, not {most}; pass its value on: {files}"
    )


def names_sharding(source: Source) -> bool:
    """True if a file names the ranks that share a cache, or what they exchange."""
    return any(SHARDING.fullmatch(word) for word in source.words)


def test_ranks_are_named_in_few_files():
    """The base of the cache, the calls and the kernels know nothing of them."""
    files = [source.path for source in CORE if names_sharding(source)]
    assert len(files) <= 12, f"a sharded cache is named in {len(files)} core files, not 12: {files}"
    assert "cache/kv_cache.py" in files
    inside = [path for path in files if path.startswith("cache/") and not path.startswith("cache/sharded/")]
    assert inside == ["cache/kv_cache.py"], "the rest of the cache reads a RouteOption"


@pytest.mark.parametrize("text", ["from .sharded import x", "view.with_own_heads()", "Ranks.of(mesh)"])
def test_a_planted_name_of_ranks_is_found(text):
    assert names_sharding(Source("call/call.py", text))
    assert not names_sharding(Source("call/call.py", "rank = 512\nparallel_plan(shards=2)"))


@pytest.mark.parametrize(
    "text",
    [
        "x.sinks",
        "sinks = 1",
        "f(sinks=1)",
        "def f(*, sinks): pass",
        "x['sinks']",
        "f'{sinks}'",
        "sinks_ptr",
        "import sinks",
    ],
)
def test_a_planted_word_is_found(text):
    assert "sinks" in Source("call/call.py", text).words


def test_what_is_no_spelling():
    text = (
        "def f():\n    'The sinks.'\n    torch.bucketize(x, right=True)  # sinks\n"
        "    f'{x} sinks'\n    sinks_of(x)"
    )
    assert not Source("call/call.py", text).words & {"sinks", "right"}
    assert "right" in Source("call/call.py", "bucketize(x, right=True)").words


@pytest.mark.parametrize("source", [x for x in CORE if x.path not in IN_ORDER], ids=lambda x: x.path)
def test_values_are_read_by_name(source):
    found = reads_by_place(source, VALUES)
    assert not found, f"name the fields, as {' and '.join(IN_ORDER)} need not: {found}"


@pytest.mark.parametrize(
    "body",
    [
        "call.score[0]",
        "x = call\n    x[1:3]",
        "call.spec[5]",
        "self.call.spec[-1]",
        "y = call._replace(q=q)\n    y[0]",
        "(Score(1.0) if q else call.score)[0]",
        "checked(call)[0]",
        "p, seed = call.dropout",
        "(p, seed), mask = call.dropout, call.mask",
        "tuple(view)[9]",
        "q, *rest = call",
        "f(*call.packing)",
        "inputs[2:9]",
        "arguments[0]",
        "Arguments(*arguments)[3]",
        "def g():\n        return call[0]",
        "return lambda: call[0]",
    ],
)
def test_a_planted_read_by_place_is_found(body):
    text = f"def f(call: 'Call | None', view: KVView, inputs, *arguments):\n    {body}\n"
    assert len(reads_by_place(Source("backends/planted.py", text), VALUES)) == 1


def test_a_method_reads_itself_by_name():
    text = "class Score(NamedTuple):\n    def f(self):\n        return self[0]"
    assert reads_by_place(Source("call/call.py", text), VALUES)


def test_other_reads_are_none():
    text = """def f(call: Call, view: KVView, k: tuple):
    call.q[0], call.q.shape[1:], view.k[page, slot], k[0], given["score"], f(call)[0]
    q, k = call.q, call.k
    b, s = call.q.shape
    k = Score(*k)
    operator(*Arguments(q))
"""
    assert not reads_by_place(Source("call/call.py", text), VALUES)


def wide_functions(sources: list[Source]) -> list[str]:
    """Functions with more parameters than they may have, but for public ones, operators, what launches name,
    and other libraries' functions.
    """
    launched = {
        alias.name
        for source in sources
        if not source.path.startswith(KERNELS)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and "kernels" in (node.module or "").split(".")
        for alias in node.names
    }
    found = []
    for source in sources:
        in_layers = source.parts[0] == "layers"
        free = {"functional.py": PUBLIC, "weights.py": RECOMPUTED, "cache/kv_cache.py": {"paged"}}.get(
            source.path, {"__init__", *LIKE_FORWARD} if in_layers else set()
        )
        if source.path == "backends/operators.py":
            continue
        in_kernels = source.path.startswith(KERNELS)
        for function in source.functions:
            n, most = len(parameters(function)), 12 if in_kernels else 10
            is_theirs = source.parts[0] == "compat" and not function.name.startswith("_")
            if n > most and not is_theirs and function.name not in (launched if in_kernels else free):
                found.append(
                    f"{source.path}: {function.name} takes {n} parameters, not {most}; gather them into a "
                    "value"
                )
    return found


def test_functions_take_few_parameters():
    assert not wide_functions(PACKAGE), "\n".join(wide_functions(PACKAGE))


def test_a_planted_wide_function_is_found():
    many, twelve = (", ".join(f"x{n}" for n in range(count)) for count in (13, 12))
    kernels = f"def entry({many}): pass\ndef device({many}): pass\ndef narrow({twelve}): pass"
    host = (
        f"from .kernels.decode import entry\ndef f({twelve}): pass\n"
        f"class A:\n    def __init__(self, {twelve}): pass"
    )
    found = wide_functions(
        [Source(f"{KERNELS}decode.py", kernels), Source("backends/_triton/decode/operators.py", host)]
    )
    assert [line.split()[1] for line in found] == ["device", "f", "__init__"]
    layer = Source(
        "layers/gqa.py",
        f"class A:\n    def __init__(self, {twelve}): pass\n    def other(self, {many}): pass",
    )
    assert [line.split()[1] for line in wide_functions([layer])] == ["other"]
    theirs = Source("compat/sdpa.py", f"def attend({twelve}): pass\ndef _made({twelve}): pass")
    assert [line.split()[1] for line in wide_functions([theirs])] == ["_made"]


def test_backends_stay_small():
    """The limit is what stood there in November 2026; a feature that needs more says so here.

    Heads of 257 to 576 channels in training, and torch's memory-efficient attention, brought 122; Hopper's
    own kernels for them 5. Recomputed probabilities and largest scores, on three backends and by four
    kernels, brought 511. Tiles of trees, told apart by bounds of their tokens, brought 87, and repeated calls
    and cache steps on CPUs 62. To leave out gradients of slopes that do not learn brought 5; statistics of
    the reference by its scores, which stay exact for a given LSE, 10; and softcap and slopes in Hopper's
    backward 15. A forward in e4m3 of 16-bit inputs brought 160: a kernel that rounds them, its launches, and
    a definition of the gradients. Lists of selected keys, on the torch and reference backends, brought 56,
    the two kernels of a forward over them 132, tiles of neighbouring queries 97, those over caches 200,
    gradients by three kernels 348, and the plan of Hopper's kernel for selected tokens of latents 29; over a
    cache, the kernel and its plan brought 28. Gradients of lists that many heads share, as products that
    multiply listed keys once, which is three times as fast, brought 228. Mask and score functions in Hopper's
    kernels over latents brought 20. Lists of rows in a cache, made while the decode kernel starts, brought
    20. Writing index keys, on two backends, brought 10, and a kernel for the scores of index branches 137; to
    read index keys in the pages of a cache, 31. A forward in e4m3 that is up to a quarter faster brought 5.
    """
    found = {source.path: source.statements for source in BACKENDS if source.is_core}
    assert sum(found.values()) <= 6468, f"{sum(found.values())} statements in backends/, not 6468: {found}"


def test_the_benchmark_stays_small():
    """What stood there when bench learned --shape and --backend, and gave efficient attention its heads.

    The tables of output gates and of heads wider than 256 brought 54, that of recomputed probabilities 49,
    that of trees 84, --blocks with its picture 160, that of mask and score functions 100, and the two of
    selected keys 98.
    """
    assert sum(source.statements for source in PACKAGE if source.parts[0] == "bench") <= 1739


@pytest.mark.parametrize("source", PACKAGE, ids=lambda x: x.path)
def test_a_file_holds_one_idea(source):
    lines = source.text.count("\n")
    assert lines <= LINES, f"{source.path} has {lines} lines, not {LINES}; split it by idea"


def test_few_files_stand_near_the_limit():
    """A limit that many files stand at is a wall that shapes them."""
    near = [source.path for source in PACKAGE if source.text.count("\n") > 0.9 * LINES]
    assert len(near) <= 0.03 * len(PACKAGE), near


@pytest.mark.parametrize("source", PACKAGE, ids=lambda x: x.path)
def test_a_function_holds_one_idea(source):
    most = IN_KERNELS if source.path.startswith(KERNELS) else STATEMENTS
    long = [(x.name, n) for x in source.functions if (n := statements(x.body)) > most]
    assert not long, f"{source.path}: {long} statements, not {most}; split the function by idea"


TEXT = '''"""A docstring
of two lines."""

# a comment
x = (
    1,  # one
)

def f(a):
    """Return it."""
    if a: b = a; return b
'''


def test_statements_are_counted_without_docstrings():
    source = Source("call/call.py", TEXT)
    assert source.statements == 5
    assert statements(source.functions[0].body) == 3
