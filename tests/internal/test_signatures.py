"""Every public callable answers unknown and missing arguments: it names the one to use, in the words of
others too.
"""

import copy
import importlib
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import attnlib
from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    Mask,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    Rope,
    attention,
    cached_attention,
    rotate,
    sliding,
    varlen_attention,
)
from attnlib.convert import mha_to_gqa
from attnlib.internal import words
from attnlib.internal.signatures import kind
from attnlib.packing import bounds_of
from attnlib.parallel import ring_attention
from attnlib.scaling import Llama3Scaling, YaRNScaling

PAGES = sorted((Path(__file__).parents[2] / "docs/api").glob("*.md"))
ENTRY = re.compile(
    r"^\.\. (currentmodule|autofunction|autoclass):: ([\w.]+)(.*)\n(?:   :members:(.*)$)?", re.MULTILINE
)


class Public(NamedTuple):
    """A public callable, called as ``call``; ``takes`` are its own arguments, and ``receivers`` how many come
    first.

    One that only attnlib calls is ``hidden``: its errors lead to what makes such a value.
    """

    call: Callable
    takes: list[inspect.Parameter]
    receivers: int
    hidden: bool

    @property
    def names(self) -> list[str]:
        return [x.name for x in self.takes if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]

    def told(self, *args, **kwargs) -> str:
        with pytest.raises(TypeError) as raised:
            self.call(*[object()] * self.receivers, *args, **kwargs)
        return str(raised.value)


def _public(call: Callable, receivers: int = 0, hidden: bool = False) -> Public:
    return Public(call, [*inspect.signature(call).parameters.values()][receivers:], receivers, hidden)


def _of_class(name: str, x: type, members: list[str] | None, hidden: bool) -> Iterator[tuple[str, Public]]:
    """Its constructor, and its methods that are attnlib's own: all without underscore, or those that are
    listed.
    """
    yield name, _public(x, hidden=hidden)
    own = [base for base in x.__mro__ if base.__module__.startswith("attnlib.")]
    for base in own:
        for key, member in vars(base).items():
            is_named = key[0] != "_" if members is None else key in members
            if is_named and isinstance(member, classmethod | staticmethod):
                yield f"{name}.{key}", _public(getattr(x, key))
            elif is_named and inspect.isfunction(member):
                yield f"{name}.{key}", _public(getattr(x, key), 1)


def documented() -> dict[str, Public]:
    """Every callable of docs/api: what a page lists of a class, else all of it that has no underscore."""
    found = {}
    for page in PAGES:
        module = ""
        for what, name, rest, members in ENTRY.findall(page.read_text()):
            if what == "currentmodule":
                module = name
                continue
            full = name if name.startswith("attnlib.") else f"{module}.{name}"
            path, _, last = full.rpartition(".")
            x = getattr(importlib.import_module(path), last)
            if inspect.isclass(x):
                listed = [word.strip() for word in members.split(",") if word.strip()] or None
                found |= dict(_of_class(full, x, listed, rest.strip() == "()"))
            else:
                found[full] = _public(x)
    return found


PUBLIC = documented()
OPEN = [
    name for name, x in PUBLIC.items() if not x.hidden and not any(p.kind is p.VAR_KEYWORD for p in x.takes)
]
# They hand arguments on to another callable, which answers.
PASSING = {name for name, x in PUBLIC.items() if not x.hidden} - {*OPEN}


def test_every_public_name_is_walked():
    """An exception is raised, not called; what is no callable is not."""
    named = {name for name in attnlib.__all__ if callable(getattr(attnlib, name))}
    errors = {name for name in named if inspect.isclass(getattr(attnlib, name))}
    errors = {name for name in errors if issubclass(getattr(attnlib, name), BaseException)}
    assert {f"attnlib.{name}" for name in named - errors} <= {*PUBLIC}
    assert len(PUBLIC) > 150
    assert {
        "attnlib.explain",
        *(f"attnlib.parallel.{name}_attention" for name in ("context", "ring", "gather", "head")),
        *(f"attnlib.compat.flash_attn.flash_attn_{name}_func" for name in ("kvpacked", "qkvpacked")),
        *(f"attnlib.compat.flash_attn.flash_attn_varlen_{name}_func" for name in ("kvpacked", "qkvpacked")),
    } == PASSING


@pytest.mark.parametrize("name", OPEN)
def test_an_unknown_argument_is_told_what_there_is(name):
    x = PUBLIC[name]
    takes = ", ".join(x.names) or "none"
    assert f"{name.rpartition('.')[2]}: qqq_zzz: no such argument; it takes {takes}" in x.told(qqq_zzz=1)
    longest = max(x.names, key=len, default="")
    if len(longest) > 4 and words.remedy_of(f"{longest}s", x.names) is None and f"{longest}s" not in x.names:
        assert re.search(r"no such argument; did you mean \w+=", x.told(**{f"{longest}s": 1}))


@pytest.mark.parametrize("name", [name for name, x in PUBLIC.items() if not x.hidden])
def test_a_missing_argument_is_named(name):
    x = PUBLIC[name]
    needed = [p.name for p in x.takes if p.default is p.empty and p.name in x.names]
    if needed:
        told = x.told()
        assert all(re.search(rf"\b{argument}\b", told) for argument in needed), told
        assert ": missing" in told or "got none; there is no default mask" in told


@pytest.mark.parametrize("name", OPEN)
def test_an_argument_too_many_is_told_where_it_belongs(name):
    x = PUBLIC[name]
    first = [p.name for p in x.takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not any(p.kind is p.VAR_POSITIONAL for p in x.takes):
        told = x.told(*[None] * (len(first) + 1))
        assert f"expected {', '.join(first) or 'no arguments'} by position" in told
        assert f"; {len(first) + 1} were given" in told


@pytest.mark.parametrize("name", [name for name, x in PUBLIC.items() if x.hidden])
def test_what_only_attnlib_makes_says_where_it_comes_from(name):
    assert re.match(rf"{name.rpartition('.')[2]}: .*\w\(", PUBLIC[name].told(qqq_zzz=1))


@pytest.mark.parametrize("name", OPEN)
def test_others_words_lead_to_arguments_that_there_are(name):
    x = PUBLIC[name]
    for word in words.REMEDIES:
        remedy = words.remedy_of(word, x.names)
        if remedy is not None and word not in x.names:
            assert f"{word}: no such argument; {remedy}" in x.told(**{word: None})
            assert {*re.findall(r"^use (\w+)=", remedy)} <= {*x.names}, f"{word}: {remedy}"


def test_a_planted_callable_without_it_is_found():
    class Planted:
        def plain(self, x):
            return x

    for call in (lambda x: x, Planted.plain):
        with pytest.raises(AssertionError):
            assert "no such argument" in _public(call).told(qqq_zzz=1)
    assert "Planted.plain: qqq_zzz: no such argument; it takes x" in _public(kind(Planted).plain).told(
        qqq_zzz=1
    )


Q = torch.randn(1, 3, 2, 8)
X = torch.randn(1, 3, 16)
LAYER = GroupedQueryAttention(16, 2, mask=CAUSAL)
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 0, "v_head_dim": 4}
packed = partial(varlen_attention, Q[0], Q[0], Q[0], mask=FULL)
latent = partial(MultiHeadLatentAttention, 16, 2, mask=CAUSAL, **LATENT)
paged = partial(KVCache.paged, [LAYER.kv_layout], pages=4, max_sequences=1)
# What is typed from habit, and what is said of it.
HABITS = {
    "attn_mask": (lambda: LAYER(X, attn_mask=None), "attn_mask: .*mask=attnlib.masks.mask_tensor.*score="),
    "key_padding_mask": (
        lambda: LAYER(X, key_padding_mask=None),
        r"use attention_mask=, True for tokens.*attention_mask=~key_padding_mask",
    ),
    "position_ids": (lambda: LAYER(X, position_ids=None), "position_ids: .*use positions="),
    "need_weights": (lambda: LAYER(X, need_weights=False), "need_weights: .*there are none"),
    "is_causal": (
        lambda: LAYER(X, is_causal=True),
        "is_causal: .*pass mask=CAUSAL or .* to the constructor of the layer",
    ),
    "past_key_values": (
        lambda: LAYER(X, past_key_values=None),
        r"past_key_values: .*kv=, a layer of cache\.step\(\)",
    ),
    "use_cache": (lambda: LAYER(X, use_cache=True), r"kv=, a layer of cache\.step\(\)"),
    "hidden_states": (lambda: LAYER(hidden_states=X), "hidden_states: .*it is x, the first argument"),
    "query": (lambda: LAYER(query=X, key=X, value=X), "query: .*it is x"),
    "key_value_states": (lambda: LAYER(X, key_value_states=X), "use context="),
    "cu_seq_lens_q": (lambda: LAYER(X, cu_seq_lens_q=None), "use cu_seqlens="),
    "x and all": (
        lambda: LAYER(X, X, X),
        "forward: expected x by position and all else by name, as context=.*3 were",
    ),
    "Rope(base=)": (lambda: Rope(8, base=1e4), "Rope: base: no such argument; use theta="),
    "Rope(head_dim=)": (lambda: Rope(head_dim=8), "Rope: head_dim: .*use dim="),
    "Rope(max_position_embeddings=)": (
        lambda: Rope(8, max_position_embeddings=9),
        "leave it out: .*at any position",
    ),
    "YaRNScaling()": (
        lambda: YaRNScaling(4.0, original_max_position_embeddings=9),
        "YaRNScaling: .*use original_max_position=",
    ),
    "sliding(window_size=)": (
        lambda: sliding(window_size=4),
        "sliding: window_size: .*use window=, which counts",
    ),
    "Mask(window_size=)": (lambda: Mask(window_size=4), r"Mask: window_size: .*left=.*sliding\(n\)"),
    "paged(dtype=)": (
        lambda: paged(dtype=torch.half),
        r"KVCache\.paged: dtype: .*layer\.kv_layout_as\(dtype\)",
    ),
    "paged(num_blocks=)": (lambda: paged(num_blocks=3), "use pages="),
    "paged(block_size=)": (lambda: paged(block_size=3), "use page_size="),
    "paged(max_batch_size=)": (lambda: paged(max_batch_size=3), "use max_sequences="),
    "paged(store=)": (lambda: paged(store=torch.int8), "use storage_dtype="),
    "grouped(head_dim=)": (
        lambda: KVLayout.grouped(2, head_dim=8),
        r"KVLayout\.grouped: head_dim: .*use dim=",
    ),
    "grouped(store=)": (lambda: KVLayout.grouped(2, 8, store=torch.int8), "use storage_dtype="),
    "grouped(keep_first=)": (lambda: KVLayout.grouped(2, 8, keep_first=1), "use first_tokens="),
    "pages_for(most=)": (lambda: KVCache.pages_for([], [], most=1), "use max_step_tokens="),
    "embed_dim": (lambda: GroupedQueryAttention(embed_dim=16, num_heads=2, mask=FULL), "it is hidden_size"),
    "batch_first": (lambda: GroupedQueryAttention(16, 2, mask=FULL, batch_first=True), "leave it out"),
    "rope_theta": (
        lambda: GroupedQueryAttention(16, 2, mask=FULL, rope_theta=1e4),
        r"use rope=Rope\(dim, theta=",
    ),
    "mrope_section": (lambda: Rope(8, mrope_section=[2, 1, 1]), r"use axes=Axes\(mrope_section, order\)"),
    "mrope_section of a layer": (
        lambda: GroupedQueryAttention(16, 2, mask=FULL, mrope_section=[2, 1, 1]),
        r"use rope=Rope\(dim, axes=\.\.\.\)",
    ),
    "image_grid_thw": (lambda: attnlib.mrope_positions(X, image_grid_thw=X), "use grids=, .*merged"),
    "mm_token_type_ids": (lambda: attnlib.mrope_positions(mm_token_type_ids=X), "use token_types="),
    "MLA": (
        lambda: MultiHeadLatentAttention(16, 2, mask=CAUSAL, q_rank=3, **LATENT),
        "did you mean q_lora_rank=",
    ),
    "a cache of a function": (
        lambda: attention(Q, Q, Q, mask=FULL, past_key_values=1),
        "call cached_attention",
    ),
    "block_table": (lambda: cached_attention(Q, None, mask=FULL, block_table=1), "use kv=, the KVView"),
    "of ranks": (
        lambda: ring_attention(Q, Q, Q, mask=FULL, mesh=None, is_causal=True),
        "is_causal: .*use mask=CAUSAL",
    ),
    "of a conversion": (lambda: mha_to_gqa(LAYER, num_key_value_heads=1), "mha_to_gqa: .*use num_kv_heads="),
    "num_heads_kv": (lambda: MultiHeadAttention(16, 2, mask=FULL, num_heads_kv=1), "use num_kv_heads="),
    "rotary_emb_dim": (
        lambda: MultiHeadAttention(16, 2, mask=FULL, rotary_emb_dim=4),
        r"use rope=Rope\(dim\)",
    ),
    "max_k": (lambda: packed(max_k=3, max_q=3), "use max_seqlen_q= and max_seqlen_k="),
    "start_pos": (lambda: LAYER(X, start_pos=3), "use positions=, or kv= for a cache"),
    "seqlen_offset": (lambda: LAYER(X, seqlen_offset=3), "use positions=, or kv= for a cache"),
    "seq_len": (lambda: LAYER(X, seq_len=3), "use positions=, or kv= for a cache"),
    "KV heads of latents": (lambda: latent(num_key_value_heads=2), "num_key_value_heads: .*leave it out"),
    "qk_head_dim": (lambda: latent(qk_head_dim=8), "use qk_nope_head_dim= and qk_rope_head_dim="),
    "head_dim of latents": (lambda: latent(head_dim=8), "use qk_nope_head_dim= and qk_rope_head_dim="),
    "Llama3Scaling(scale_factor=)": (lambda: Llama3Scaling(scale_factor=8.0), "use factor="),
    "load(subfolder=)": (
        lambda: attnlib.load_pretrained("x", subfolder="y"),
        "subfolder: .*path of the inner folder",
    ),
    "qv": (lambda: attention(Q, Q, Q, mask=FULL, qv=Q), "qv: no such argument; not supported"),
    "device_mesh": (lambda: MultiHeadAttention(16, 2, mask=FULL, device_mesh=1), r"parallel_plan\(mesh\)"),
    "s_aux": (lambda: attention(Q, Q, Q, mask=FULL, s_aux=1), "use sinks="),
    "learnable_sink": (lambda: attention(Q, Q, Q, mask=FULL, learnable_sink=1), "use sinks="),
    "sinks of a layer": (lambda: MultiHeadAttention(16, 2, mask=FULL, s_aux=1), "use sinks=True"),
    "deterministic": (
        lambda: attention(Q, Q, Q, mask=FULL, deterministic=True),
        "use_deterministic_algorithms",
    ),
    "generator": (lambda: attention(Q, Q, Q, mask=FULL, generator=1), "use dropout_seed="),
    "pages of packed": (lambda: packed(block_table=1), "call cached_attention"),
    "seqused_k": (lambda: packed(seqused_k=1), r"mask=attnlib\.masks\.seqused\(queries, keys\)"),
    "k_cache": (lambda: cached_attention(Q, None, mask=FULL, k_cache=1), "use kv=, the KVView"),
    "cache_leftpad": (
        lambda: cached_attention(Q, None, mask=FULL, cache_leftpad=1),
        r"left_padding= to admit\(\)",
    ),
    "rotary_cos": (
        lambda: cached_attention(Q, None, mask=FULL, rotary_cos=1),
        r"attnlib\.rotate\(q, .*angles=",
    ),
    "paged(batch=)": (lambda: paged(batch=3), "use max_sequences="),
    "contiguous(batch=)": (lambda: KVCache.contiguous([], batch=3), "use max_sequences="),
    "block_mask(B=)": (lambda: attnlib.masks.dilated(2).block_mask(B=1), "B: no such argument; use b="),
    "block_mask(H=)": (lambda: attnlib.masks.dilated(2).block_mask(H=1), "H: no such argument; use h="),
    "block_mask(Q_LEN=)": (
        lambda: attnlib.masks.dilated(2).block_mask(Q_LEN=1),
        "Q_LEN: no such argument; use s=",
    ),
    "block_mask(KV_LEN=)": (
        lambda: attnlib.masks.dilated(2).block_mask(KV_LEN=1),
        "KV_LEN: no such argument; use t=",
    ),
    "bounds_of(key_padding_mask=)": (
        lambda: bounds_of(key_padding_mask=1),
        r"bounds_of\(~key_padding_mask\)",
    ),
    "rotate(cos=)": (lambda: rotate(Q, cos=1, sin=1), r"use angles=, as from rope\.angles\(positions\)"),
    "rotate(sin=)": (lambda: rotate(Q, sin=1), r"use angles=, as from rope\.angles\(positions\)"),
    "rotate(position_ids=)": (lambda: rotate(Q, position_ids=1), r"use angles=rope\.angles\(position_ids\)"),
    "of a method": (lambda: Mask().shift(by=2), r"Mask\.shift: by: no such argument; it takes n"),
    "given twice": (
        lambda: sliding(4, window=3),
        "sliding: window: expected once, got it by position and by name",
    ),
}


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_is_answered(habit):
    typed, said = HABITS[habit]
    with pytest.raises(TypeError) as raised:
        typed()
    assert re.search(said, str(raised.value), re.DOTALL), str(raised.value)


def test_q_lora_rank_may_be_left_out():
    layer = MultiHeadLatentAttention(16, 2, mask=CAUSAL, **LATENT)
    assert layer.q_lora_rank is None
    assert layer(X).shape == X.shape


def test_an_error_from_within_is_its_own():
    """Also one of the same words, from a function that is called there."""

    @kind
    def outer(x: int) -> int:
        def inner(y: int) -> int:
            return y

        return inner(z=x)

    with pytest.raises(TypeError, match=r"inner\(\) got an unexpected keyword argument 'z'"):
        outer(1)


def test_what_is_seen_of_a_callable_stays():
    assert str(inspect.signature(Rope)) == str(inspect.signature(Rope.__init__.__wrapped__)).replace(
        "(self, ", "("
    )
    assert [*inspect.signature(LAYER.forward).parameters][:3] == ["x", "context", "kv"]
    assert LAYER.forward.__doc__.startswith("Attend with ``x`` ``[b, s, m]``")
    assert KVCache.paged.__qualname__ == "KVCache.paged"
    for x in (attention, rotate, sliding, sliding(4), Rope(8), YaRNScaling(2.0, 64), LAYER.kv_layout):
        again = pickle.loads(pickle.dumps(x))
        assert again is x or again == x
    assert pickle.loads(pickle.dumps(LAYER.forward))(X).shape == X.shape
    assert torch.equal(copy.deepcopy(LAYER)(X), LAYER(X))


@pytest.mark.parametrize("kind_of", ["grouped", "latent"])
def test_it_compiles_into_one_graph(kind_of):
    class Whole(nn.Module):
        """Makes a rope and a mask in its forward, and calls what is public."""

        def __init__(self):
            super().__init__()
            sizes = LATENT | {"qk_rope_head_dim": 8, "rope": Rope(8, interleaved=True)}
            self.layer = (
                GroupedQueryAttention(16, 2, mask=CAUSAL, rope=Rope(8))
                if kind_of == "grouped"
                else MultiHeadLatentAttention(16, 2, mask=CAUSAL, **sizes)
            )

        def forward(self, x):
            q = self.layer(x, mask=sliding(2)).unflatten(-1, (2, 8))
            q = rotate(q, Rope(4).angles(torch.arange(x.shape[1])))
            return attention(q, q, q, mask=Mask(right=0))

    whole, x = Whole(), torch.randn(2, 5, 16)
    torch.testing.assert_close(torch.compile(whole, fullgraph=True, backend="eager")(x), whole(x))
