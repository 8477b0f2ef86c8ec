"""Ropes of several axes: equal positions are one position, and each order is that of its model."""

import copy
import doctest
import importlib
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_cases import LENGTH, SCALINGS

import attnlib
from attnlib import Axes, Rope, rotate
from attnlib.rope import axes as axes_module
from attnlib.rope.selected import select
from attnlib.scaling import LinearScaling, Llama3Scaling, LongRoPEScaling, YaRNScaling

ORDERS = ("blocks", "interleaved", "alternating", "ladders", "even_odd")
seeds = st.integers(0, 2**16)


@st.composite
def drawn_axes(draw, orders=ORDERS):
    """Axes of any order that its sections fit."""
    order, n = draw(st.sampled_from(orders)), draw(st.integers(1, 4))
    if order in ("blocks", "alternating"):
        first, size = draw(st.integers(1, 9)), st.integers(1, 9)
        later = draw(st.lists(size, min_size=n - 1, max_size=n - 1))
        return Axes((first, *(later if order == "blocks" else later[:1] * (n - 1))), order)
    if order == "interleaved":
        pairs = draw(st.integers(2 * n, 24))
        later = [draw(st.integers(1, len(range(axis, pairs, n)))) for axis in range(1, n)]
        return Axes((pairs - sum(later), *later), order)
    if order == "ladders" and draw(st.booleans()):
        return Axes((8, 4, 4), order)
    return Axes((draw(st.integers(1, 9)),) * n, order)


@settings(max_examples=60, deadline=None)
@given(drawn_axes(ORDERS[:3]), st.sampled_from(sorted(SCALINGS)), seeds)
def test_equal_positions_rotate_as_one_axis_to_the_bit(axes, rule, seed):
    dim, length = 2 * sum(axes.sections), LENGTH.get(rule)
    dim_fits = dim > 2 or rule not in ("ntk", "dynamic")
    scaling, n = SCALINGS[rule] if dim_fits else None, len(axes.sections)
    length = length if dim_fits else None
    positions = torch.randint(-9, 100_000, (2, 5), generator=torch.Generator().manual_seed(seed))
    ours = Rope(dim, scaling=scaling, axes=axes).angles(positions.expand(n, 2, 5), length=length)
    one = Rope(dim, scaling=scaling).angles(positions, length=length)
    assert torch.equal(ours.cos, one.cos)
    assert torch.equal(ours.sin, one.sin)
    assert ours.cos.is_contiguous()


@settings(max_examples=60, deadline=None)
@given(drawn_axes(), seeds)
def test_each_pair_has_its_axis_and_frequency(axes, seed):
    """The angles of a pair are those of one axis, at the position on the pair's axis."""
    pairs, n = sum(axes.sections), len(axes.sections)
    assert [axes.pair_axes.count(a) for a in range(n)] == [*axes.sections]
    positions = torch.randint(0, 100_000, (n, 2, 5), generator=torch.Generator().manual_seed(seed))
    ours, one = (Rope(2 * pairs, axes=x).angles(positions) for x in (axes, None))
    found = zip(axes.pair_axes, axes.frequency_indices, strict=True)
    for c, (axis, frequency) in enumerate(found):
        assert torch.equal(ours.cos[..., c], one.cos[axis, ..., frequency])
        assert torch.equal(ours.sin[..., c], one.sin[axis, ..., frequency])


def test_the_orders_as_they_are_published():
    t, h, w = range(3)
    assert Axes((2, 3, 3), "blocks").pair_axes == (t, t, h, h, h, w, w, w)
    assert Axes((4, 2, 2), "interleaved").pair_axes == (t, h, w, t, h, w, t, t)
    assert Axes((11, 11, 10), "interleaved").pair_axes == (*(t, h, w) * 10, t, h)
    assert Axes((2, 3, 3), "alternating").pair_axes == (h, w, h, w, h, w, t, t)
    assert Axes((3, 3), "ladders").pair_axes == Axes((3, 3), "even_odd").pair_axes == (0, 0, 0, 1, 1, 1)
    assert Axes((3, 3), "ladders").frequency_indices == (0, 2, 4, 0, 2, 4)
    assert Axes((3, 3), "even_odd").frequency_indices == (0, 2, 4, 1, 3, 5)
    assert Axes((3, 3), "interleaved").pair_axes == (0, 1, 0, 1, 0, 1)  # as NeoMME's rows and columns
    for order in ORDERS[:3]:
        assert Axes((3, 3, 3), order).frequency_indices == (*range(9),)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from((2, 4, 8)), min_size=1, max_size=4), seeds)
def test_each_ladder_is_the_rope_of_its_axis(sections, seed):
    """A ladder of n pairs has the frequencies of Rope(2 n), whatever the other axes have."""
    sections = [s for s in sections if sum(sections) % s == 0]
    if not sections or any(sum(sections) % s for s in sections):
        sections = [4, 4]
    rope = Rope(2 * sum(sections), 500.0, axes=Axes((*sections,), "ladders"))
    frequencies = rope.inverse_frequencies().split(sections)
    for own, section in zip(frequencies, sections, strict=True):
        assert torch.equal(own, Rope(2 * section, 500.0).inverse_frequencies())


# Agreement with transformers

MROPE = {  # the embedding, its config, the order of its axes and whether channel pairs are interleaved
    "qwen2_vl": ("Qwen2VLRotaryEmbedding", "Qwen2VLTextConfig", "blocks", False),
    "qwen2_5_vl": ("Qwen2_5_VLRotaryEmbedding", "Qwen2_5_VLTextConfig", "blocks", False),
    "glm4v": ("Glm4vTextRotaryEmbedding", "Glm4vTextConfig", "blocks", True),
    "qwen3_vl": ("Qwen3VLTextRotaryEmbedding", "Qwen3VLTextConfig", "interleaved", False),
    "qwen3_omni_moe": (
        "Qwen3OmniMoeThinkerTextRotaryEmbedding",
        "Qwen3OmniMoeTextConfig",
        "interleaved",
        False,
    ),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeTextRotaryEmbedding",
        "Ernie4_5_VLMoeTextConfig",
        "alternating",
        True,
    ),
}
RULES = {
    "default": (None, {}),
    "linear": (LinearScaling(4.0), {"factor": 4.0}),
    "yarn": (YaRNScaling(4.0, 2048), {"factor": 4.0, "original_max_position_embeddings": 2048}),
    "llama3": (
        Llama3Scaling(8.0, 1.0, 4.0, 2048),
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
    ),
}
SECTIONS = {
    "blocks": ((16, 24, 24), (8, 12, 12), (3, 1, 4)),
    "interleaved": ((24, 20, 20), (11, 11, 10), (5, 2, 1)),
    "alternating": ((20, 22, 22), (2, 3, 3), (5, 1, 1)),
}


def transformers_module(name: str):
    pytest.importorskip("transformers", minversion="5")
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def near(ours, theirs):
    """Phases are fp32 products of frequencies that may differ by some units in the last place."""
    bound = 4 * 4096 * 2**-23
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound * theirs.abs().max().item())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", MROPE)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_q_and_k_rotate_as_in_transformers(family, rule, data):
    embedding, config, order, interleaved = MROPE[family]
    module = transformers_module(family)
    if family == "ernie4_5_vl_moe" and rule != "default":
        pytest.skip("Ernie takes no scaling")
    sections = data.draw(st.sampled_from(SECTIONS[order]))
    theta = data.draw(st.sampled_from((10_000.0, 500_000.0, 1e6)))
    seed = torch.Generator().manual_seed(data.draw(seeds))
    scaling, fields = RULES[rule]
    listed = [*sections[1:], sections[0]] if family.startswith("ernie") else [*sections]
    rope_parameters = {"rope_type": rule, "rope_theta": theta, "mrope_section": listed} | fields
    dim = 2 * sum(sections)
    sizes = {"hidden_size": 4 * dim, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": dim}
    if family == "glm4v":  # rotates half of each head
        sizes["head_dim"], rope_parameters["partial_rotary_factor"] = 2 * dim, 0.5
    configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    made = getattr(configs, config)(**sizes, rope_parameters=rope_parameters, max_position_embeddings=4096)
    theirs = getattr(module, embedding)(made)
    positions = torch.randint(0, 4096, (3, 2, 7), generator=seed)
    q, k = (torch.randn(2, heads, 7, sizes["head_dim"], generator=seed) for heads in (4, 2))
    wanted = module.apply_rotary_pos_emb(q, k, *theirs(q, positions))
    rope = Rope(dim, theta, scaling, interleaved, Axes(sections, order))
    angles = rope.angles(positions)
    for x, y in zip((q, k), wanted, strict=True):
        ours = rotate(x.transpose(1, 2), angles).transpose(1, 2)
        near(torch.cat((rope.amplitude * ours[..., :dim], ours[..., dim:]), -1), y)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "pixtral"])
@settings(max_examples=5, deadline=None)
@given(width=st.sampled_from((2, 6, 16, 20)), theta=st.sampled_from((100.0, 10_000.0)), seed=seeds)
def test_patches_rotate_as_in_transformers_vision_encoders(family, width, theta, seed):
    module = transformers_module(family)
    title = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "pixtral": "Pixtral"}
    config = getattr(module, f"{title[family]}VisionConfig")()
    config.head_dim, config.rope_parameters = 4 * width, {"rope_type": "axial", "rope_theta": theta}
    theirs = getattr(module, f"{title[family]}VisionRotaryEmbedding")(config)
    seed = torch.Generator().manual_seed(seed)
    positions, q = torch.randint(0, 99, (2, 7), generator=seed), torch.randn(7, 3, 4 * width, generator=seed)
    cos, sin = theirs(q, positions.T)
    wanted = q * cos[:, None] + module.rotate_half(q) * sin[:, None]
    order = "even_odd" if family == "pixtral" else "ladders"
    near(rotate(q, Rope(4 * width, theta, axes=Axes((width, width), order)).angles(positions)), wanted)


# Selected pairs, compilation, values


@pytest.mark.parametrize("axes", [Axes((2, 1, 1), "interleaved"), Axes((2, 2), "ladders")])
def test_selected_pairs_rotate_as_in_the_source(axes):
    source, pairs = Rope(8, axes=axes), (3, 0, 0, 2, 1)
    positions = torch.randint(0, 9_000, (len(axes.sections), 2, 5))
    ours, theirs = select(source, pairs).angles(positions), source.angles(positions)
    assert torch.equal(ours.cos, theirs.cos[..., pairs])
    assert torch.equal(ours.sin, theirs.sin[..., pairs])


@pytest.mark.parametrize("order", ORDERS)
def test_compiles_to_one_graph(order):
    torch._dynamo.reset()
    rope = Rope(12, axes=Axes((2, 2, 2), order))
    call = lambda x, positions: rotate(x, rope.angles(positions))  # noqa: E731
    x, positions = torch.randn(2, 5, 3, 12), torch.randint(0, 99, (3, 2, 5))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, positions), call(x, positions))


def test_angles_of_a_batch_of_positions_by_vmap():
    rope, positions = Rope(12, axes=Axes((2, 2, 2), "interleaved")), torch.randint(0, 99, (4, 3, 5))
    found = torch.vmap(lambda x: rope.angles(x).cos)(positions)
    assert torch.equal(found, rope.angles(positions.movedim(0, 1)).cos)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
def test_a_cuda_graph_computes_the_angles(order):
    rope, positions = Rope(12, axes=Axes((2, 2, 2), order)), torch.zeros(3, 5, dtype=torch.int64).cuda()
    rope.angles(positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        angles = rope.angles(positions)
    positions.copy_(torch.randint(0, 99, (3, 5)))
    graph.replay()
    assert torch.equal(angles.cos, rope.angles(positions).cos)


def test_axes_are_plain_values():
    axes = Axes((2, 1, 1), "blocks")
    rope = Rope(8, axes=axes)
    assert rope == Rope(8, axes=Axes((2, 1, 1), "blocks")) != Rope(8, axes=Axes((2, 1, 1), "interleaved"))
    assert hash(rope) == hash(Rope(8, axes=Axes((2, 1, 1), "blocks")))
    assert copy.deepcopy(rope) == pickle.loads(pickle.dumps(rope)) == rope
    assert repr(axes) == "Axes(sections=(2, 1, 1), order='blocks')"
    assert rope.angles(torch.zeros(3, 5, dtype=torch.int32, device="meta")).cos.shape == (5, 4)
    assert doctest.testmod(axes_module, extraglobs={"attnlib": attnlib}) == (0, 4)


# Refusals


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (([2, 1, 1], "blocks"), TypeError, r"axes.sections: expected a tuple of ints, got \[2, 1, 1\]"),
        (((), "blocks"), ValueError, "axes.sections: expected 1 to 4 axes, got 0"),
        (((1,) * 5, "blocks"), ValueError, "expected 1 to 4 axes, got 5"),
        (((2, 0), "blocks"), ValueError, "axes.sections: expected at least 1, got 0"),
        (((2, 1.0), "blocks"), TypeError, "axes.sections: expected an int, got 1.0"),
        (((2, 1), 3), TypeError, "axes.order: expected one of blocks, .*even_odd, got 3"),
        (((2, 1), "interleave"), ValueError, "got 'interleave'; did you mean 'interleaved'"),
        (((2, 1), "x"), ValueError, "got 'x'$"),
        (((16, 24, 24), "interleaved"), ValueError, "at most 21, 21 of 64 pairs for the axes after the fir"),
        (((22, 22, 20), "alternating"), ValueError, "equal sections .*Ernie's config lists the first axis l"),
        (((3, 2), "ladders"), ValueError, "expected divisors of their sum 5 with order='ladders'"),
        (((3, 2), "even_odd"), ValueError, r"expected equal sections with order='even_odd', got \(3, 2\)"),
    ],
)
def test_wrong_axes_are_refused(args, error, message):
    with pytest.raises(error, match=message):
        Axes(*args)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"axes": (2, 1, 1)}, TypeError, r"rope.axes: expected Axes such as Axes\(\(16.*got \(2, 1, 1\)"),
        ({"axes": Axes((2, 2, 2), "blocks")}, ValueError, "rope.axes: expected sections .* 4, the .*dim=8"),
        *(
            (
                {"axes": Axes((2, 2), "ladders"), "scaling": scaling},
                ValueError,
                f"got {type(scaling).__name__}",
            )
            for scaling in (*SCALINGS.values(), LongRoPEScaling((1.0,) * 4, (2.0,) * 4, 2.0, 64))
            if not isinstance(scaling, LinearScaling | Llama3Scaling | None)
        ),
    ],
)
def test_ropes_whose_axes_do_not_fit_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        Rope(8, **fields)


@pytest.mark.parametrize("shape", [(), (5,), (2, 5), (1, 2, 5), (4, 2, 5)])
def test_positions_without_the_axes_are_refused(shape):
    rope = Rope(8, axes=Axes((2, 1, 1), "blocks"))
    with pytest.raises(ValueError, match=r"positions: expected \[axes=3, \.\.\.\].*got .*positions\.expand"):
        rope.angles(torch.zeros(shape, dtype=torch.int64))
