"""Packed steps in which a few sequences have many new tokens and the others few: long sequences have splits
too.
"""

from dataclasses import replace

import pytest
import torch
from decode_helpers import Call, Sizes, assert_right, moved_pages, plan_for, store
from helpers import assert_same_bits
from kernel_helpers import DEVICE, INTERPRETED

from attnlib import CAUSAL, FULL, KVLayout, Mask, sliding
from attnlib.backends._triton.decode import operators as triton_cached
from attnlib.backends._triton.decode.shapes import DecodeShapes
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.backends.operators import flat_over_view
from attnlib.call.call import Call as Attention
from attnlib.call.call import checked

GROUPED, LATENT = KVLayout.grouped(2, 16), KVLayout.latent(32, 8)
LENGTHS, LONG = ((90, 61, 7, 110), 27) if INTERPRETED else ((9000, 5000, 40, 12000), 150)
COUNTS = (1, LONG, 1, 1)
PROCESSORS = 9 if INTERPRETED else 132


@pytest.fixture
def plan(monkeypatch):
    """Plans for so many multiprocessors; on the interpreter with small tiles and short splits."""

    def anew(processors: int = PROCESSORS):
        small = {"tiles": LaunchConfig(16, 16, 2, 4), "small": True} if INTERPRETED else {}
        plan_for(monkeypatch, processors=processors, **small)

    anew()
    yield anew
    monkeypatch.undo()
    plan_for(monkeypatch)


def mixed(layout: KVLayout = GROUPED, counts=COUNTS, mask: Mask = CAUSAL, options=()) -> Call:
    return store(layout, Sizes(LENGTHS, page_size=8)).call(counts, 6, mask, options).scheduled()


def shapes(call: Call) -> DecodeShapes:
    """What the launches of a call are planned from."""
    view = call.stored.view
    asked = checked(Attention(call.q.to(DEVICE), call.mask, kv=view))
    return DecodeShapes(triton_cached.decode_key(flat_over_view(asked, view.schedule)))


def test_long_sequences_have_splits(plan):
    """As many as fill a device; none where it is full without, or where no sequence is long."""
    splits = []
    for processors in (1, PROCESSORS, 2 * PROCESSORS):
        plan(processors)
        splits.append(shapes(mixed()).long_splits)
    assert splits[0] == 1 < splits[1] < splits[2]
    assert shapes(mixed(counts=(1, 1, 1, 1))).long_splits == 1


@pytest.mark.parametrize(
    ("layout", "mask", "options"),
    [
        (GROUPED, CAUSAL, ()),
        (LATENT, FULL, ("sinks", "softcap")),
        (replace(GROUPED, storage_dtype=torch.int8), sliding(20), ("alibi_slopes", "sinks")),
        (GROUPED, Mask(None, -3, 9), ("per_sequence_slopes",)),
    ],
    ids=["grouped", "latent", "sliding", "prefix"],
)
def test_any_offsets(layout, mask, options, plan):
    """One plan serves whatever a captured step of as many tokens holds."""
    calls = [mixed(layout, counts, mask, options) for counts in (COUNTS, (LONG, 0, 0, 3))]
    plans = [(x.long_splits, x.programs, x.lines) for x in map(shapes, calls)]
    assert plans[0][0] > 1
    assert len(set(plans)) == 1
    for call in calls:
        assert_right(call)


def test_sequences_in_a_call_of_their_own(plan):
    """A mixed step is what a step of the long sequence and one of the others are; in pages of any order to
    the bit.
    """
    call = mixed(options=("sinks",))
    results, view = call.solve(), call.stored.view
    assert_same_bits(*zip(moved_pages(call).solve(), results, strict=True))
    for n, count in enumerate(COUNTS):
        q, _ = call.of(n, call.q, call.q[..., 0].transpose(-1, -2))
        one = {name: getattr(view, name)[n : n + 1] for name in ("table", "starts", "lengths")}
        alone = replace(call.over(**one, cu_seqlens_q=None, schedule=None), q=q, counts=count)
        torch.testing.assert_close(alone.solve(), call.of(n, *results))
