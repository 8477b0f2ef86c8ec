"""Positions of text, images and videos: as transformers counts them, whatever the padding or packing."""

import doctest
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import mrope_positions
from attnlib.rope import mrope

TEXT, IMAGE, VIDEO = range(3)
small = st.integers(1, 5)
runs = st.lists(st.tuples(st.sampled_from((IMAGE, VIDEO)), small, small, small, small), max_size=4)


def prompt(first: int, parts, last: int) -> tuple[list[int], list[tuple[int, tuple[int, int, int]]]]:
    """Token types and grids: ``first`` text tokens, then of each part an image or video and more text; after
    the last part, as many text tokens as ``last``.
    """
    types, grids = [TEXT] * first, []
    for number, (modality, time, height, width, text) in enumerate(parts, 1):
        text = text if number < len(parts) else last
        time = time if modality == VIDEO else 1
        grids.append((modality, (time, height, width)))
        types += [modality] * (time * height * width) + [TEXT] * text
    return types, grids


@st.composite
def prompts(draw):
    """A batch of prompts, padded on either side: token types, attention mask and grids in order."""
    rows = draw(st.lists(st.tuples(small, runs, st.integers(0, 3)), min_size=1, max_size=3))
    made = [prompt(*row) for row in rows]
    longest, is_left = max(len(types) for types, _ in made), draw(st.booleans())
    types, shown = [], []
    for row, _ in made:
        padding = longest - len(row)
        fill, there = [TEXT] * padding, [1] * len(row)
        types.append(fill + row if is_left else row + fill)
        shown.append([0] * padding + there if is_left else there + [0] * padding)
    return torch.tensor(types), torch.tensor(shown), [grid for _, grids in made for grid in grids]


def sizes(grids) -> torch.Tensor:
    return torch.tensor([size for _, size in grids], dtype=torch.int64).view(-1, 3)


def of_modality(grids, wanted) -> torch.Tensor | None:
    """The grids of images or videos before merging, as transformers' processors give them."""
    found = [size for modality, size in grids if modality == wanted]
    return torch.tensor(found) * torch.tensor([1, 2, 2]) if found else None


def counted_by_transformers(family: str, types, shown, grids, **more):
    pytest.importorskip("transformers", minversion="5")
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    model = getattr(module, {"qwen2_vl": "Qwen2VLModel", "qwen2_5_vl": "Qwen2_5_VLModel"}[family])
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=3)
    given = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    given.get_vision_position_ids = model.get_vision_position_ids.__get__(given)
    images, videos = (of_modality(grids, wanted) for wanted in (IMAGE, VIDEO))
    return model.get_rope_index(given, types, types, images, videos, attention_mask=shown, **more)


@settings(max_examples=60, deadline=None)
@given(prompts())
def test_positions_are_those_of_qwen2_vl(batch):
    types, shown, grids = batch
    ours, following = mrope_positions(types, sizes(grids), attention_mask=shown)
    theirs, deltas = counted_by_transformers("qwen2_vl", types, shown, grids)
    assert torch.equal(ours, theirs)
    assert torch.equal(following, shown.sum(1) + deltas[:, 0])


@settings(max_examples=30, deadline=None)
@given(prompts(), st.sampled_from((0.4, 1.0, 2.7)))
def test_time_intervals_are_those_of_qwen2_5_vl(batch, seconds):
    types, shown, grids = batch
    intervals = torch.tensor([3 * seconds if modality == VIDEO else 1.0 for modality, _ in grids])
    ours, following = mrope_positions(types, sizes(grids), attention_mask=shown, time_intervals=intervals)
    videos = [seconds for modality, _ in grids if modality == VIDEO]
    theirs, deltas = counted_by_transformers("qwen2_5_vl", types, shown, grids, second_per_grid_ts=videos)
    assert torch.equal(ours, theirs)
    assert torch.equal(following, shown.sum(1) + deltas[:, 0])


@settings(max_examples=30, deadline=None)
@given(prompts(), st.integers(0, 3))
def test_packed_sequences_count_as_rows_do(batch, slack):
    """Rows side by side; tokens after the last sequence are of none, and have position 0."""
    types, shown, grids = batch
    rows, following = mrope_positions(types, sizes(grids), attention_mask=shown)
    there = shown.bool()
    cu = torch.cat((torch.zeros(1), shown.sum(1).cumsum(0))).int()
    packed = torch.cat((types[there], torch.ones(slack, dtype=torch.int64)))
    ours, ends = mrope_positions(packed, sizes(grids), cu_seqlens=cu)
    assert torch.equal(ours[:, : int(cu[-1])], rows[:, there])
    assert not ours[:, int(cu[-1]) :].any()
    assert torch.equal(ends, following)


def test_images_side_by_side_and_empty_rows():
    """Grids separate images between which there is no text; a bool mask and int32 are fine too."""
    types = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0]])
    grids = torch.tensor([[1, 1, 2], [1, 2, 2]], dtype=torch.int32)
    shown = torch.tensor([[1] * 7, [0] * 7])
    wanted = [[0, 0, 2, 2, 2, 2, 4], [0, 0, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]
    for kind in (types, types.bool(), types.int()):
        positions, following = mrope_positions(kind, grids, attention_mask=shown)
        assert positions.dtype == following.dtype == torch.int64
        assert positions[:, 0].tolist() == wanted
        assert following.tolist() == [5, 0]
    text = mrope_positions(torch.zeros(2, 5).int(), torch.zeros(0, 3).int())
    assert torch.equal(text[0], torch.arange(5).expand(3, 2, 5))
    assert text[1].tolist() == [5, 5]
    assert mrope_positions(torch.zeros(2, 0).int(), grids[:0])[1].tolist() == [0, 0]


def test_compiles_and_runs_without_values():
    torch._dynamo.reset()
    types, grids = torch.tensor([[0, 1, 1, 1, 1, 0]]), torch.tensor([[1, 2, 2]])
    compiled = torch.compile(mrope_positions, fullgraph=True, backend="eager")
    for ours, wanted in zip(compiled(types, grids), mrope_positions(types, grids), strict=True):
        assert torch.equal(ours, wanted)
    positions, following = mrope_positions(types.to("meta"), grids.to("meta"))
    assert (positions.shape, following.shape) == ((3, 1, 6), (1,))
    assert doctest.testmod(mrope) == (0, 4)


TYPES, GRIDS = torch.tensor([[0, 1, 1, 0, 1, 1]]), torch.tensor([[1, 1, 2], [1, 2, 1]])
PACK, SPLIT = (torch.tensor(offsets, dtype=torch.int32) for offsets in ([0, 3, 6], [0, 2, 6]))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"token_types": [0, 1]}, TypeError, "token_types: expected a tensor, got list"),
        ({"token_types": TYPES.float()}, TypeError, "token_types: expected ints, got torch.float32"),
        ({"token_types": TYPES[0]}, ValueError, r"token_types: expected \[b, s\], got \(6,\)"),
        ({"grids": None}, TypeError, "grids: expected a tensor, got NoneType"),
        ({"grids": GRIDS[0]}, ValueError, r"grids: expected \[n, 3\], time.* got \(3,\)"),
        ({"grids": GRIDS[:, 1:]}, ValueError, r"grids: expected \[n, 3\], .*got \(2, 2\)"),
        ({"grids": GRIDS.to("meta")}, ValueError, "grids: expected device cpu like token_types, got meta"),
        ({"grids": GRIDS * torch.tensor([1, 2, 2])}, ValueError, "grids: expected the 4 tok.*16; divide the"),
        ({"grids": GRIDS - 1}, ValueError, "grids: expected at least 1 in each dimension, got 0"),
        ({"grids": GRIDS[:1]}, ValueError, "grids: expected the 4 tokens .* grids of 2"),
        ({"grids": torch.tensor([[1, 2, 2]])}, ValueError, "token_types: expected the tokens of each image"),
        (
            {"attention_mask": TYPES[:, 1:]},
            ValueError,
            r"attention_mask: expected \[b=1, s=6\], got \(1, 5\)",
        ),
        ({"attention_mask": TYPES != 1}, ValueError, "grids: expected the 0 tokens"),
        ({"cu_seqlens": PACK}, ValueError, r"token_types: expected \[t\], got \(1, 6\)"),
        ({"time_intervals": torch.ones(3)}, ValueError, r"time_intervals: expected \[n=2\], got \(3,\)"),
        ({"time_intervals": torch.ones(2) * 1j}, TypeError, "time_intervals: expected real numbers, got "),
        ({"token_types": TYPES[0], "cu_seqlens": PACK.float()}, TypeError, "cu_seqlens: expected ints"),
        ({"token_types": TYPES[0], "cu_seqlens": PACK + 1}, ValueError, r"cu_seqlens: .*got \[1, 4, 7\]"),
        ({"token_types": TYPES[0], "cu_seqlens": PACK[:0]}, ValueError, r"cu_seqlens: .*got \[\]"),
        (
            {"token_types": TYPES[0], "cu_seqlens": SPLIT},
            ValueError,
            "token_types: expected the tokens of each image and video side by side in one sequence",
        ),
        (
            {"token_types": TYPES[0], "cu_seqlens": PACK, "attention_mask": TYPES[0]},
            ValueError,
            "attention_mask: expected None with cu_seqlens",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given, error, message):
    given = {"token_types": TYPES, "grids": GRIDS} | given
    with pytest.raises(error, match=message):
        mrope_positions(given.pop("token_types"), given.pop("grids"), **given)
