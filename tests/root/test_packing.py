"""From what people have to what calls take."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tree_cases import EXAMPLE, SEQUENCES, by_dict

from attnlib import CAUSAL, FULL, GroupedQueryAttention, KVCache, attention, varlen_attention
from attnlib.internal.padding import edges_of
from attnlib.masks.ready_made import mask_tensor
from attnlib.packing import bounds_of, from_jagged, from_position_ids, last_rows, to_jagged, tree


@given(
    st.integers(0, 9).flatmap(
        lambda t: st.lists(st.lists(st.integers(0, 2), min_size=t, max_size=t), max_size=4)
    )
)
def test_bounds_hold_all_tokens_and_no_more(rows):
    """And where they would hold others too, they are refused, and the row is named."""
    mask = torch.tensor(rows, dtype=torch.int64).view(len(rows), len(rows[0]) if rows else 0)
    holed = [n for n, row in enumerate(rows) if "0" in "".join(str(min(x, 1)) for x in row).strip("0")]
    if holed:
        with pytest.raises(
            ValueError, match=rf"attention_mask: .* got holes in row {holed[0]}; .*masks\.mask_tensor\("
        ):
            bounds_of(mask)
    starts, ends = edges_of(mask != 0) if holed else bounds_of(mask)
    assert starts.dtype == ends.dtype == torch.int32
    for row, start, end in zip(rows, starts.tolist(), ends.tolist(), strict=True):
        there = [n for n, x in enumerate(row) if x]
        assert (start, end) == ((there[0], there[-1] + 1) if there else (0, 0))


def test_the_remedy_for_holes_says_what_the_mask_says():
    attention_mask, q = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 0, 0]]), torch.randn(2, 5, 2, 8)
    with pytest.raises(ValueError, match="holes in row 0"):
        bounds_of(attention_mask)
    shown = mask_tensor(attention_mask[:, None, None] != 0)
    expected = attention(q[:1], q[:1, [1, 3, 4]], q[:1, [1, 3, 4]], mask=FULL)
    torch.testing.assert_close(attention(q, q, q, mask=shown)[:1], expected)


def test_a_compiler_does_not_read_the_mask():
    holed = torch.tensor([[0, 1, 0, 1, 0]])
    starts, ends = torch.compile(bounds_of, fullgraph=True, backend="eager")(holed)
    assert (starts.item(), ends.item()) == (1, 4)


def test_a_mask_without_values_has_bounds_of_its_shape():
    starts, ends = bounds_of(torch.ones(2, 5, device="meta"))
    assert starts.shape == ends.shape == (2,)


def test_what_is_no_padding_mask_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask: expected \[b, t\], got \(1, 2, 3\)"):
        bounds_of(torch.ones(1, 2, 3))
    with pytest.raises(TypeError, match="attention_mask: expected a"):
        bounds_of([[1, 1]])


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), max_size=3), st.integers(0, 5))
def test_offsets_are_those_of_what_begins_again(rows, first):
    width = max(map(sum, rows), default=0)
    rows = [[*row, *[1] * (width - sum(row))] for row in rows]
    positions = [torch.cat([torch.arange(n) + first for n in row]) for row in rows]
    given = torch.stack(positions) if rows else torch.empty(0, 0, dtype=torch.int64)
    lengths = [n for row in rows for n in row]
    cu_seqlens, longest = from_position_ids(given)
    assert cu_seqlens.dtype == torch.int32
    if first != 1:  # one that begins with 1 may go on from a sequence of one token
        assert (cu_seqlens.diff().tolist(), longest) == (lengths, max(lengths, default=0))


def test_what_are_no_positions_is_refused():
    with pytest.raises(ValueError, match=r"position_ids: expected \[b, s\] or \[s\], got \(1, 2, 3\)"):
        from_position_ids(torch.ones(1, 2, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"position_ids: expected integers, got torch.float32"):
        from_position_ids(torch.ones(3))
    with pytest.raises(TypeError, match="position_ids: expected a"):
        from_position_ids([0, 1])


@given(st.lists(st.integers(1, 5), max_size=5), st.sampled_from([torch.int32, torch.int64]))
def test_last_rows_are_those_of_each_sequence_alone(lengths, dtype):
    x = torch.arange(sum(lengths))
    cu_seqlens = torch.tensor([0, *lengths], dtype=dtype).cumsum(0, dtype=dtype)
    rows = last_rows(cu_seqlens)
    assert rows.dtype == torch.int64
    assert x[rows].tolist() == [int(part[-1]) for part in x.split(lengths)]


def test_last_rows_of_a_cache_step():
    layer = GroupedQueryAttention(16, 2, mask=CAUSAL)
    cache = KVCache.paged([layer.kv_layout], pages=8, page_size=4, max_sequences=3)
    lengths, x = (5, 1, 3), torch.randn(9, 16)
    with torch.no_grad(), cache.step(dict(zip(cache.admit(3), lengths, strict=True))) as (kv,):
        y = layer(x, kv=kv)[last_rows(kv.view().cu_seqlens_q)]
        alone = [layer(part[None])[0, -1] for part in x.split(lengths)]
    torch.testing.assert_close(y, torch.stack(alone))


def test_a_compiler_finds_last_rows_for_any_number_of_sequences():
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda x, offsets: x[last_rows(offsets)], fullgraph=True, dynamic=True, backend=counter
    )
    for offsets in ([0, 2, 6], [0, 1, 4, 5], [0, 3, 4, 5, 9]):
        x = torch.randn(offsets[-1], 4)
        assert torch.equal(
            compiled(x, torch.tensor(offsets, dtype=torch.int32)), x[[n - 1 for n in offsets[1:]]]
        )
    assert counter.frame_count == 1


def test_last_rows_have_a_shape_without_values():
    assert last_rows(torch.empty(4, dtype=torch.int32, device="meta")).shape == (3,)


@pytest.mark.parametrize(
    ("offsets", "got"), [([0, 3, 3, 5], "0 in sequence 1"), ([0, 4, 3], "-1 in sequence 1")]
)
def test_a_sequence_without_a_last_row_is_named(offsets, got):
    with pytest.raises(
        ValueError, match=f"cu_seqlens: expected at least one row in each sequence, got {got};"
    ):
        last_rows(torch.tensor(offsets))


def test_a_compiler_does_not_read_the_offsets():
    compiled = torch.compile(last_rows, fullgraph=True, backend="eager")
    assert compiled(torch.tensor([0, 0, 3, 3, 5])).tolist() == [-1, 2, 2, 4]


def test_what_are_no_offsets_is_refused():
    with pytest.raises(TypeError, match=r"cu_seqlens: expected int32 or int64 offsets, got torch.float32"):
        last_rows(torch.ones(3))
    with pytest.raises(TypeError, match="cu_seqlens: expected a tensor, got list"):
        last_rows([0, 3])
    for shape in ((0,), (2, 3), ()):
        with pytest.raises(ValueError, match=r"cu_seqlens: expected offsets \[n \+ 1\], got"):
            last_rows(torch.ones(shape, dtype=torch.int32))


def jagged(*lengths, heads=2):
    """A NestedTensor of sequences of these lengths, and its leaves."""
    leaves = [torch.randn(n, heads, 8, dtype=torch.float64, requires_grad=True) for n in lengths]
    return torch.nested.as_nested_tensor(leaves, layout=torch.jagged), leaves


def test_jagged_tensors_go_through_packed_calls():
    """Each sequence as by itself, gradients too; queries and keys may differ in length."""
    (q, of_q), (k, of_k), (v, of_v) = jagged(5, 1, 7, heads=4), jagged(6, 3, 7), jagged(6, 3, 7)
    (rows, cu_q, longest), (keys, cu_k, _), (values, _, _) = map(from_jagged, (q, k, v))
    assert longest == 7
    out = to_jagged(
        varlen_attention(rows, keys, values, mask=CAUSAL, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), cu_q
    )
    assert out.is_nested
    assert out.layout is torch.jagged
    alone = [attention(*(x[None] for x in one), mask=CAUSAL)[0] for one in zip(of_q, of_k, of_v, strict=True)]
    for ours, expected in zip(out.unbind(), alone, strict=True):
        torch.testing.assert_close(ours, expected)
    leaves = [*of_q, *of_k, *of_v]
    ours = torch.autograd.grad(out.values().square().sum(), leaves)
    theirs = torch.autograd.grad(sum(x.square().sum() for x in alone), leaves)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected)


def test_what_is_no_jagged_tensor_is_refused():
    x, _ = jagged(2, 3)
    for other, got in ((torch.ones(2, 3), "layout torch.strided"), ([1], "list")):
        with pytest.raises(
            TypeError, match=f"x: expected a NestedTensor of layout torch.jagged, got .*{got}"
        ):
            from_jagged(other)
    with pytest.raises(ValueError, match="ragged in its second dimension"):
        from_jagged(x.transpose(1, 2))
    holes = torch.nested.narrow(
        torch.ones(2, 5, 4), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), torch.jagged
    )
    with pytest.raises(ValueError, match="without holes"):
        from_jagged(holes)
    with pytest.raises(TypeError, match="x: expected a"):
        to_jagged(x, x.offsets())


@given(SEQUENCES)
@example([[0], [0, 1], [0, 0, 2], [0, 1, 2], [0, 2]])  # the last one leaves a token of the first
def test_a_tree_holds_every_prefix_once(sequences):
    """In depth-first order, its branches as they first appear, whatever holds the tokens."""
    expected = by_dict(sequences)
    for given_as in (list, lambda x: torch.tensor(x, dtype=torch.int16)):
        made = tree([given_as(x) for x in sequences])
        found = (
            *(x.tolist() for x in (made.tokens, made.positions, made.ends)),
            [x.tolist() for x in made.rows],
        )
        assert found == expected
    assert [x.dtype for x in made[:3]] == [torch.int64, torch.int64, torch.int32]
    assert all(x.dtype == torch.int64 for x in made.rows)


def test_a_tree_gives_its_sequences_back():
    made = tree(EXAMPLE)
    assert [made.tokens[rows].tolist() for rows in made.rows] == EXAMPLE
    assert all(made.positions[rows].tolist() == list(range(len(rows))) for rows in made.rows)


def test_a_tree_ignores_the_default_device():
    with torch.device("meta"):
        merged = tree([[5, 6, 7], [5, 8]])
    assert merged.tokens.tolist() == [5, 6, 7, 8]
    assert merged.rows[1].tolist() == [0, 3]


def test_long_sequences_share_a_long_prompt():
    prompt = torch.randint(0, 50_000, (9_000,))
    made = tree([torch.cat((prompt[: 9_000 - 100 * n], torch.full((1_000,), -n))) for n in range(20)])
    assert len(made.tokens) == 9_000 + 20 * 1_000
    assert made.ends[0] == len(made.tokens)
    assert made.ends[8_999] == 10_000


@pytest.mark.parametrize(
    ("sequences", "error", "message"),
    [
        (torch.zeros(2, 3), TypeError, "sequences: expected a list of sequences, got Tensor"),
        (3, TypeError, "sequences: expected a list of sequences, got int"),
        ([[1], 2], TypeError, r"sequences\[1\]: expected a tensor or a list of integers, got int"),
        ([[1], "ab"], TypeError, r"sequences\[1\]: expected a tensor or a list of integers, got str"),
        ([[1, 2.0]], TypeError, r"sequences\[0\]: expected integers, got 2.0"),
        ([[1, True]], TypeError, r"sequences\[0\]: expected integers, got True"),
        ([torch.zeros(2)], TypeError, r"sequences\[0\]: expected integers, got torch.float32"),
        ([torch.zeros(1, 2).int()], ValueError, r"sequences\[0\]: expected \[len\], got \(1, 2\)"),
        ([[1], torch.zeros(1, device="meta").int()], ValueError, "sequences: expected tensors on one device"),
    ],
)
def test_what_is_no_list_of_sequences_is_refused(sequences, error, message):
    with pytest.raises(error, match=message):
        tree(sequences)
