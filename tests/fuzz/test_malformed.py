"""Every public entry with malformed arguments: a typed error that names one, or a right answer; never
anything else.
"""

import linecache
import re
import traceback
from pathlib import Path

import pytest
from fuzz_caches import CACHES
from fuzz_entries import ATTENTION
from fuzz_layers import LAYERS
from fuzz_ropes import ROPES
from fuzz_values import values_for
from hypothesis import given, settings
from hypothesis import strategies as st

import attnlib

ERRORS = (ValueError, TypeError, NotImplementedError, RuntimeError, attnlib.CacheFullError)
ROOM = str(Path(attnlib.__file__).parent)


def refusal(entry, args, error: BaseException) -> str | None:
    """What is wrong with an error, or None: it is of a listed type, raised by attnlib, and starts with a
    name.
    """
    if type(error) not in ERRORS:
        return f"{type(error).__name__} is no typed error"
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    if not file.startswith(ROOM) or not linecache.getline(file, line).lstrip().startswith("raise"):
        return f"raised by {file}:{line}"
    if isinstance(error, attnlib.CacheFullError):
        return None
    start = str(error).split(":")[0]
    names = (start, *re.split(r", |\.", start))
    return None if {*names} & {*args, *entry.words} else "it names no argument"


def fault(entry, target, args) -> str | None:
    """What is wrong with what the call does, or None."""
    legal = entry.legal(target, args)
    before = target.state() if hasattr(target, "state") else None
    try:
        result = entry.call(target, **args)
    except Exception as error:
        wrong = "a legal call was refused" if legal else refusal(entry, args, error)
        if before is not None:
            target.assert_unchanged(before)
        return wrong and f"{wrong}: {type(error).__name__}: {str(error)[:200]}"
    if not legal:
        return f"accepted, giving {str(result)[:60]!r}"
    try:
        entry.right(target, args, result)
    except AssertionError as error:
        return f"a wrong answer: {error}"
    return None


ENTRIES = ATTENTION | ROPES | CACHES | LAYERS
# Values, errors, and what calls give out.
NOT_CALLED = {
    "CAUSAL",
    "QUERY_OFFSET",
    "FLOP_FORMULAS",
    "FULL",
    "CacheFullError",
    "Explanation",
    "Fp8Inputs",
    "SequenceHandle",
    "KVView",
    "LayoutWarning",
    "MaskFunction",
    "CHECKPOINT_SAVE_OPS",
    "ScoreFunction",
    "SlowPathWarning",
    "TraceError",
    "load_pretrained",  # whose folders tests/convert/test_own.py damages
    "mask_mod",  # whose functions test_trace.py tries
    "score_mod",
}


def test_every_public_name_has_an_entry():
    assert set(attnlib.__all__) <= {re.split(r"[.,]", entry)[0] for entry in ENTRIES} | NOT_CALLED


CASES = [(name, argument) for name, entry in ENTRIES.items() for argument in entry.arguments(entry.target())]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # torch's own, of what it calls prototypes
@pytest.mark.parametrize(("name", "argument"), CASES)
def test_one_malformed_argument(name, argument):
    entry, faults = ENTRIES[name], []
    target = entry.target()
    for what, value in values_for(entry.arguments(target)[argument]).items():
        target = entry.target() if hasattr(target, "state") else target
        args = entry.arguments(target) | {argument: value}
        if wrong := fault(entry, target, args):
            faults.append(f"{argument}={what}: {wrong}")
    assert not faults, "\n".join(faults)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("name", ENTRIES)
@settings(max_examples=10)
@given(data=st.data())
def test_several_malformed_arguments(name, data):
    entry = ENTRIES[name]
    target = entry.target()
    args = entry.arguments(target)
    for argument in sorted(
        data.draw(st.sets(st.sampled_from(sorted(args)), min_size=min(2, len(args)), max_size=4))
    ):
        values = values_for(args[argument])
        args[argument] = values[data.draw(st.sampled_from(sorted(values)), label=argument)]
    assert (wrong := fault(entry, target, args)) is None, wrong
