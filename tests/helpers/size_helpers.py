"""Layouts and shapes to draw, and the layer of a shape."""

import torch
from hypothesis import strategies as st

from attnlib import CAUSAL, Gate, GroupedQueryAttention, KVLayout, MultiHeadLatentAttention, Rope, sliding
from attnlib.sizes import GroupedShape, LatentShape

index_dtypes = st.sampled_from([None, torch.float8_e4m3fn])
stores = st.sampled_from([None, torch.int8, torch.float8_e4m3fn])
windows = st.none() | st.integers(1, 9)
gates = st.none() | st.builds(Gate, st.sampled_from(["head", "channel"]), bias=st.booleans())


@st.composite
def layouts(draw, windows=st.none()):  # noqa: B008 (strategies are values)
    dtypes, dims = st.sampled_from([torch.float16, torch.float32, torch.float64]), st.integers(1, 5)
    stored = {"dtype": draw(dtypes), "storage_dtype": draw(stores), "window": draw(windows)}
    if draw(st.booleans()):
        stored |= {"index_dim": draw(dims), "index_heads": draw(dims), "index_dtype": draw(index_dtypes)}
    if draw(st.booleans()):
        return KVLayout.latent(draw(dims), draw(st.integers(0, 3)), **stored)
    return KVLayout.grouped(draw(dims), draw(dims), draw(dims), **stored)


@st.composite
def grouped_shapes(draw, windows=windows):
    kv_heads = draw(st.integers(1, 3))
    options = {name: draw(st.booleans()) for name in ("bias", "output_bias", "qk_norm", "sinks")}
    sizes = {
        "num_kv_heads": kv_heads,
        "num_heads": kv_heads * draw(st.integers(1, 3)),
        "head_dim": draw(dims),
    }
    options |= {"gate": draw(gates), "values": draw(st.sampled_from((None, "keys")))}
    return GroupedShape(hidden_size=draw(dims), **sizes, **options, window=draw(windows))


@st.composite
def latent_shapes(draw, windows=windows):
    return LatentShape(
        hidden_size=draw(dims),
        num_heads=draw(st.integers(1, 3)),
        q_lora_rank=draw(st.none() | dims),
        kv_lora_rank=draw(dims),
        qk_nope_head_dim=draw(dims),
        qk_rope_head_dim=2 * draw(st.integers(0, 2)),
        v_head_dim=draw(dims),
        window=draw(windows),
        gate=draw(gates),
    )


dims = st.integers(2, 12)
shapes = grouped_shapes() | latent_shapes()


def make_layer(shape, *, device="meta", dtype=torch.bfloat16):
    """The layer of this shape."""
    mask = CAUSAL if shape.window is None else sliding(shape.window)
    made = {"mask": mask, "device": device, "dtype": dtype}
    if isinstance(shape, GroupedShape):
        names = ("num_kv_heads", "head_dim", "bias", "output_bias", "qk_norm", "sinks", "gate", "own_keys")
        names += ("values",)
        layer = GroupedQueryAttention
    else:
        names = (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "gate",
            "own_keys",
        )
        layer = MultiHeadLatentAttention
        made["rope"] = Rope(shape.qk_rope_head_dim, interleaved=True) if shape.qk_rope_head_dim else None
    return layer(shape.hidden_size, shape.num_heads, **{name: getattr(shape, name) for name in names}, **made)
