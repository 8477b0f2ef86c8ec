"""How far one option is spread, how values are read, and how long things may be: numbers that keep changes local."""

import ast

import pytest
from source import BACKENDS, CORE, KERNELS, PACKAGE, ROOT, Source, parameters
from source_values import Values, reads_by_place

SCORE_OPTIONS = ("softcap", "alibi_slopes", "sinks")
MASK_FIELDS = ("left", "right", "prefix")
DESCALES = ("q_descale", "k_descale", "v_descale")
FILES_OF_A_WORD = dict.fromkeys(SCORE_OPTIONS, 10) | dict.fromkeys(MASK_FIELDS, 9) | dict.fromkeys(DESCALES, 8)
DOORS = {"attention", "varlen_attention", "cached_attention"}
PUBLIC = {*DOORS, *(f"{name}_with_lse" for name in DOORS)}
LINES = 450  # of a file
LONG = {("call/spec.py", "describe")}  # functions beyond 40 lines: none may be added
VALUES = Values(CORE)
# torch gives and takes flat lists; their order is written in the first, and the second is what torch calls.
IN_ORDER = ("backends/operators.py", "backends/autograd.py")


@pytest.mark.parametrize("word", FILES_OF_A_WORD)
def test_an_option_is_spelled_in_few_files(word):
    files = [source.path for source in CORE if word in source.words]
    most = FILES_OF_A_WORD[word]
    assert len(files) <= most, f"{word} is spelled in {len(files)} core files, not {most}; pass its value on: {files}"


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
    text = "def f():\n    'The sinks.'\n    torch.bucketize(x, right=True)  # sinks\n    f'{x} sinks'\n    sinks_of(x)"
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
    """Functions with more parameters than they may have, but for public ones, operators, what launches name, and
    other libraries' functions.
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
        free = {"functional.py": PUBLIC, "cache/kv_cache.py": {"paged"}}.get(
            source.path, {"__init__", "forward"} if in_layers else set()
        )
        if source.path == "backends/operators.py":
            continue
        in_kernels = source.path.startswith(KERNELS)
        for function in source.functions:
            n, most = len(parameters(function)), 12 if in_kernels else 10
            is_theirs = source.parts[0] == "compat" and not function.name.startswith("_")
            if n > most and not is_theirs and function.name not in (launched if in_kernels else free):
                found.append(
                    f"{source.path}: {function.name} takes {n} parameters, not {most}; gather them into a value"
                )
    return found


def test_functions_take_few_parameters():
    assert not wide_functions(PACKAGE), "\n".join(wide_functions(PACKAGE))


def test_a_planted_wide_function_is_found():
    many, twelve = (", ".join(f"x{n}" for n in range(count)) for count in (13, 12))
    kernels = f"def entry({many}): pass\ndef device({many}): pass\ndef narrow({twelve}): pass"
    host = f"from .kernels.decode import entry\ndef f({twelve}): pass\nclass A:\n    def __init__(self, {twelve}): pass"
    found = wide_functions(
        [Source(f"{KERNELS}decode.py", kernels), Source("backends/_triton/decode/operators.py", host)]
    )
    assert [line.split()[1] for line in found] == ["device", "f", "__init__"]
    layer = Source(
        "layers/gqa.py", f"class A:\n    def __init__(self, {twelve}): pass\n    def other(self, {many}): pass"
    )
    assert [line.split()[1] for line in wide_functions([layer])] == ["other"]
    theirs = Source("compat/sdpa.py", f"def attend({twelve}): pass\ndef _made({twelve}): pass")
    assert [line.split()[1] for line in wide_functions([theirs])] == ["_made"]


def test_backends_and_kernels_stay_small():
    """2,500 lines of code, and what splits long packed sequences, repeats calls (160), plans Hopper's kernels (40),
    takes fp8 inputs (50) and runs masks and scores by function on a CPU (215);
    what inlines those in Triton's kernels (330), and what finds the tiles that they hide (300), over caches too (140);
    what launches those again without asking Triton (20); what pieces of a call add to the gradients of the whole (40);
    what ranks write into each other's memory (180);
    what tries private functions of torch and Triton (250); what functions do with integers of any kind, in int64 if
    they may leave int32 (150).
    """
    lines = {source.path: len(source.code_lines) for source in BACKENDS if source.is_core}
    assert sum(lines.values()) <= 4855, f"{sum(lines.values())} lines of code in backends/, not 4855: {lines}"


def test_the_benchmark_stays_small():
    """1,600 lines, and what compares several ranks with one (185)."""
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "bench").glob("*.py")) <= 1785


@pytest.mark.parametrize("source", PACKAGE, ids=lambda x: x.path)
def test_a_file_holds_one_idea(source):
    lines = source.text.count("\n")
    assert lines <= LINES, f"{source.path} has {lines} lines, not {LINES}; split it by idea"


def test_few_files_stand_near_the_limit():
    """A limit that many files stand at is a wall that shapes them."""
    near = [source.path for source in PACKAGE if source.text.count("\n") > 0.9 * LINES]
    assert len(near) <= 0.03 * len(PACKAGE), near


def length(source: Source, function: ast.FunctionDef) -> int:
    """Lines of a kernel, all told; of any other function the lines of code of its body."""
    if source.path.startswith(KERNELS):
        return function.end_lineno - function.lineno + 1
    return len(source.code_lines & {*range(function.body[0].lineno, function.end_lineno + 1)})


@pytest.mark.parametrize("source", PACKAGE, ids=lambda x: x.path)
def test_a_function_holds_one_idea(source):
    most = 120 if source.path.startswith(KERNELS) else 40
    long = [(x.name, n) for x in source.functions if (n := length(source, x)) > most]
    wrong = [found for found in long if (source.path, found[0]) not in LONG]
    assert not wrong, f"{source.path}: {wrong} lines, not {most}; split the function by idea"


def test_the_long_functions_are_as_listed():
    assert len(LONG) <= 3
    for path, name in LONG:
        source = Source(path, (ROOT / path).read_text())
        assert any(x.name == name and length(source, x) > 40 for x in source.functions), (
            f"LONG lists {path} {name} still"
        )


TEXT = '''"""A docstring
of two lines."""

# a comment
x = (
    1,  # one

)

def f(a):
    """Says it."""
    return a
'''


def test_lines_of_code_are_counted():
    source = Source("call/call.py", TEXT)
    assert len(source.code_lines) == 5
    assert length(source, source.functions[0]) == 1
    assert length(Source(f"{KERNELS}band.py", TEXT), source.functions[0]) == 3
