"""attnlib's paged cache in ``generate``, against transformers' own; free pages are NaN all the while."""

import copy

import pytest
import torch
from families import CACHE, DECODERS, lively, recent
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache

from attnlib.integrations import transformers as hf
from tests.integrations.test_encoders import BOTH, TOKENS, padded
from tests.integrations.test_transformers import WAYS, agree, both, tokens

UNPAGED = ("minimax", "nemotron_h")  # which has a cache of its own, or layers without anything to cache
SLOW = [case for case in recent() if case.values[0] not in UNPAGED]
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
LOGITS = {"output_logits": True, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    monkeypatch.setenv("ATTNLIB_CHECK", "1")


def paged(model, **options) -> hf.PagedCache:
    return hf.PagedCache(model, **{"pages": 96, "page_size": 4, "max_sequences": 8} | options)


def pair_of(family: str, way: str = "layers"):
    eager, ours = both(family, way)
    return eager, hf.absorb(ours) if way == "attention" and hasattr(
        ours.config.get_text_config(), "kv_lora_rank"
    ) else ours


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", [*DECODERS, *SLOW])
@torch.no_grad()
def test_generated_tokens(family, way):
    """Of a batch that is padded on the left."""
    eager, ours = pair_of(family, way)
    ids, mask = tokens(eager, 3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, :4], mask[1, :9] = 0, 0
    theirs = eager.generate(ids, attention_mask=mask, **OPTIONS, **LOGITS)
    mine = ours.generate(ids, attention_mask=mask, **{CACHE: paged(ours)}, **OPTIONS, **LOGITS)
    assert torch.equal(mine.sequences, theirs.sequences)
    agree(torch.stack(mine.logits), torch.stack(theirs.logits))


@torch.no_grad()
def test_what_comes_later_is_shown_where_a_mask_says_so():
    """As parts of an image see each other; in a step after others."""
    eager, ours = pair_of("llama")
    ids, cache, theirs = tokens(eager, 1, 15), paged(ours), DynamicCache(config=eager.config)
    shown = torch.ones(15, 15, dtype=torch.bool).tril()
    shown[9:12, 9:12] = True
    for begin, end in ((0, 8), (8, 15)):
        given = shown[None, None, begin:end, :end]
        mine = ours(ids[:, begin:end], **{CACHE: cache}, attention_mask=given).logits
        added = torch.zeros(given.shape).masked_fill(~given, torch.finfo(torch.float32).min)
        agree(mine, eager(ids[:, begin:end], **{CACHE: theirs}, attention_mask=added).logits)


@pytest.mark.parametrize("family", ["llama", "gemma2", "llama4_text", "deepseek_v3"])
@torch.no_grad()
def test_several_tokens_after_a_prompt(family):
    """With the same cache: another turn of a conversation."""
    eager, ours = pair_of(family)
    ids, cache, theirs = tokens(eager, 2, 30), paged(ours), DynamicCache(config=eager.config)
    for begin, end in ((0, 9), (9, 20), (20, 21), (21, 30)):
        mine = ours(ids[:, begin:end], **{CACHE: cache}).logits
        agree(mine, eager(ids[:, begin:end], **{CACHE: theirs}).logits)


@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v3"])
@torch.no_grad()
def test_beams_share_pages(family):
    eager, ours = pair_of(family)
    ids, cache = tokens(eager, 2, 5), paged(ours)
    options = OPTIONS | {"num_beams": 3, "max_new_tokens": 24}
    theirs, mine = eager.generate(ids, **options), ours.generate(ids, **{CACHE: cache}, **options)
    assert torch.equal(mine, theirs)
    assert len(cache.handles) == 6
    layout = cache.kv.layouts[0]
    apart = 6 * -(-cache.length // 4) * 4 * layout.token_bytes * len(cache.kv.layouts)
    assert cache.kv.used_bytes < apart


@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.no_grad()
def test_an_assistant_takes_tokens_back(family):
    eager, ours = pair_of(family)
    assistant = copy.deepcopy(ours)
    for x in assistant.parameters():
        x.add_(0.02 * torch.randn_like(x))  # so that it errs
    ids = tokens(eager, 1, 9)
    theirs = eager.generate(ids, **OPTIONS)
    cache = paged(ours, rollback=32)
    assert torch.equal(ours.generate(ids, **{CACHE: cache}, assistant_model=assistant, **OPTIONS), theirs)


@torch.no_grad()
def test_rows_are_forked_and_chosen():
    eager, ours = pair_of("gemma2")
    cache, theirs = paged(ours), DynamicCache(config=eager.config)
    ids = tokens(eager, 2, 11)
    for model, own in ((eager, theirs), (ours, cache)):
        model(ids, **{CACHE: own})
    used = cache.kv.used_bytes
    for own in (theirs, cache):
        own.batch_repeat_interleave(3)
    assert cache.kv.used_bytes == used
    more = tokens(eager, 6, 2)
    agree(ours(more, **{CACHE: cache}).logits, eager(more, **{CACHE: theirs}).logits)
    assert cache.kv.used_bytes > used
    for rows in (torch.tensor([5, 0, 3]), torch.tensor([True, False, True])):
        for own in (theirs, cache):
            own.batch_select_indices(rows)
        step = tokens(eager, len(cache.handles), 1)
        agree(ours(step, **{CACHE: cache}).logits, eager(step, **{CACHE: theirs}).logits)


@torch.no_grad()
def test_windows_drop_pages():
    """All but those that a query still reaches, in whole pages."""
    _, ours = pair_of("mistral")
    cache = paged(ours, pages=8, max_length=64)
    ours.generate(tokens(ours, 2, 5), **{CACHE: cache}, **OPTIONS | {"max_new_tokens": 50})
    assert cache.length == 54
    assert (
        cache.kv.used_bytes <= 2 * 2 * 3 * 4 * cache.kv.layouts[0].token_bytes
    )  # layers, rows, pages, tokens


@pytest.mark.parametrize("store", [torch.int8, torch.float8_e4m3fn])
@torch.no_grad()
def test_bytes(store):
    eager, ours = pair_of("llama")
    ids, cache = tokens(eager, 2, 20), paged(ours, storage_dtype=store)
    ours(ids[:, :-1], **{CACHE: cache})
    mine, theirs = ours(ids[:, -1:], **{CACHE: cache}).logits, eager(ids).logits[:, -1:]
    assert 1e-5 < (mine - theirs).norm() / theirs.norm() < 0.05
    assert cache.kv.layouts[0].storage_dtype == store


@torch.no_grad()
def test_a_cache_is_used_again_after_reset():
    eager, ours = pair_of("llama")
    cache = paged(ours)
    for rows in (3, 2):
        ids = tokens(eager, rows, 7)
        assert torch.equal(ours.generate(ids, **{CACHE: cache}, **OPTIONS), eager.generate(ids, **OPTIONS))
        cache.reset()
        assert (cache.length, cache.kv.used_bytes, cache.get_seq_length()) == (0, 0, 0)


@torch.no_grad()
def test_a_model_that_raises_midway_leaves_the_cache_as_it_was():
    eager, ours = pair_of("llama")
    ids, cache = tokens(eager, 2, 9), paged(ours)
    ours(ids[:, :5], **{CACHE: cache})

    def fail(*_):
        raise OSError("midway")

    hook = ours.model.layers[0].mlp.register_forward_hook(fail)
    with pytest.raises(OSError, match="midway"):
        ours(ids[:, 5:], **{CACHE: cache})
    hook.remove()
    assert cache.get_mask_sizes(1, 0) == (6, 0)
    agree(ours(ids[:, 5:], **{CACHE: cache}).logits, eager(ids).logits[:, 5:])


class Added(nn.Linear):
    """A projection with something beside its weight, as adapters have it."""

    def forward(self, x):
        return super().forward(x) + 0.1 * x[..., :1]


@torch.no_grad()
def test_up_projections_that_are_no_plain_weights_expand():
    eager, ours = pair_of("deepseek_v3", "attention")
    for model in (eager, ours):
        for block in model.model.layers:
            block.self_attn.kv_b_proj.__class__ = Added
    ids, cache = tokens(eager, 2, 14), paged(ours)
    agree(ours(ids[:, :9], **{CACHE: cache}).logits, eager(ids).logits[:, :9])
    agree(ours(ids[:, 9:], **{CACHE: cache}).logits, eager(ids).logits[:, 9:])


@pytest.mark.parametrize("family", BOTH)
@torch.no_grad()
def test_decoders_with_an_encoder(family):
    """Pages for what grows, and theirs for what the encoder gives once."""
    torch.manual_seed(0)
    eager = lively(
        AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[family](**TOKENS | BOTH[family])).float()
    ).eval()
    ours = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation("attnlib")
    ids, mask = padded()
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    cache = EncoderDecoderCache(paged(ours), DynamicCache())
    assert torch.equal(ours.generate(ids, **{CACHE: cache}, **options), eager.generate(ids, **options))


# What is refused


def test_another_attention_is_refused():
    eager, _ = pair_of("llama")
    with pytest.raises(ValueError, match=r"attn_implementation='attnlib'.*got 'eager'"):
        paged(eager)


@torch.no_grad()
def test_another_attention_is_told():
    """Should it be chosen later: it got NaN, and no page was read."""
    _, ours = pair_of("llama", "attention")
    cache, ids = paged(ours), tokens(ours, 1, 4)
    ours(ids, **{CACHE: cache})
    ours.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="layer 0: expected attention to the pages"):
        ours(ids[:, :1], **{CACHE: cache})


def test_expanded_latents_are_refused():
    _, ours = both("deepseek_v3")
    with pytest.raises(ValueError, match=r"call hf.absorb\(model\)"):
        paged(ours)


@torch.no_grad()
def test_other_rows_are_refused():
    _, ours = pair_of("llama")
    cache = paged(ours)
    ours(tokens(ours, 3, 4), **{CACHE: cache})
    with pytest.raises(ValueError, match=r"expected 3 rows as before, got 2; call reset\(\)"):
        ours(tokens(ours, 2, 1), **{CACHE: cache})


def test_an_assistant_needs_tokens_behind_a_window():
    _, ours = pair_of("mistral")
    with pytest.raises(ValueError, match="rollback: expected as many tokens"):
        paged(ours).activate_past_recording()


def test_cropping_to_a_length_is_refused():
    _, ours = pair_of("llama")
    with pytest.raises(ValueError, match="tokens_to_remove: expected at most 0"):
        paged(ours).crop(3)


# Hybrid models, whose convolutions keep states of transformers


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_states_follow_their_rows(way):
    """In beams, and where rows are forked and chosen."""
    eager, ours = pair_of("lfm2", way)
    ids, options = tokens(eager, 2, 5), OPTIONS | {"num_beams": 3}
    theirs = eager.generate(ids, **options)
    assert torch.equal(ours.generate(ids, **{CACHE: paged(ours)}, **options), theirs)
    cache, theirs = paged(ours), DynamicCache(config=eager.config)
    rows = torch.arange(2)
    for chosen in ([0, 0, 1, 1], [3, 0], [False, True]):
        step = tokens(eager, len(rows), 3)
        agree(ours(step, **{CACHE: cache}).logits, eager(step, **{CACHE: theirs}).logits)
        if chosen == [0, 0, 1, 1]:
            cache.batch_repeat_interleave(2)
        else:
            cache.batch_select_indices(torch.tensor(chosen))
        rows = torch.arange(len(rows))[torch.tensor(chosen)]
        theirs.reorder_cache(rows)
    assert len(cache.handles) == 1
    step = tokens(eager, 1, 1)
    agree(ours(step, **{CACHE: cache}).logits, eager(step, **{CACHE: theirs}).logits)


@torch.no_grad()
def test_states_cannot_take_tokens_back():
    eager, ours = pair_of("lfm2")
    with pytest.raises(NotImplementedError, match=r"rollback: expected layers .* recurrent state of layer 0"):
        paged(ours, rollback=4)
    cache, ids = paged(ours), tokens(eager, 1, 9)
    ours(ids, **{CACHE: cache})
    assert not cache.is_croppable
    with pytest.raises(NotImplementedError, match="crop: expected layers that can take back tokens"):
        cache.crop(-1)
    with pytest.raises(NotImplementedError, match="activate_past_recording: expected layers that can take"):
        ours.generate(ids, **{CACHE: paged(ours)}, assistant_model=copy.deepcopy(ours), **OPTIONS)


@pytest.mark.parametrize("at", [(1, "_stored"), (2, "_query")], ids=["before", "after"])
@pytest.mark.parametrize("when", ["first", "later"])
@torch.no_grad()
def test_a_step_that_failed_after_a_state_changed_needs_a_reset(when, at, monkeypatch):
    """Before it has stored keys, or after."""
    eager, ours = pair_of("lfm2")
    cache, ids = paged(ours), tokens(eager, 2, 9)
    if when == "later":
        ours(ids, **{CACHE: cache})
    with monkeypatch.context() as patch:
        patch.setattr(ours.model.layers[at[0]].self_attn, at[1], lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ours(ids, **{CACHE: cache})
    with pytest.raises(RuntimeError, match=r"states that it may have changed; call reset\(\)"):
        ours(ids, **{CACHE: cache})
    cache.reset()
    ids = tokens(eager, 3, 7)  # more rows than before
    agree(ours(ids, **{CACHE: cache}).logits, eager(ids).logits)
    ours.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a call without the cache does not concern it
        ours(ids)
    del ours.lm_head._forward_pre_hooks[next(iter(ours.lm_head._forward_pre_hooks))]
    ours(ids, **{CACHE: cache})


@torch.no_grad()
def test_a_step_whose_pages_were_not_read_needs_a_reset(monkeypatch):
    eager, ours = pair_of("lfm2")
    cache, ids = paged(ours), tokens(eager, 2, 9)
    ours(ids, **{CACHE: cache})
    update = cache.layers[1].update
    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[1], "update", lambda *given: [x.clone() for x in update(*given)])
        with pytest.raises(RuntimeError, match="layer 1: expected attention to the pages"):
            ours(ids, **{CACHE: cache})
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        ours(ids, **{CACHE: cache})


@pytest.mark.parametrize(
    ("family", "message"),
    [("nemotron_h", "that keep keys and values, got 'mlp'"), ("minimax", "takes any cache, got minimax")],
)
def test_a_model_without_pages_is_refused(family, message):
    with pytest.raises(NotImplementedError, match=message):
        paged(pair_of(family)[1])


def test_a_model_of_states_alone_is_refused():
    _, ours = pair_of("lfm2")
    ours.config.layer_types = ["conv"] * 3
    with pytest.raises(NotImplementedError, match="expected a layer that keeps keys and values, got none"):
        paged(ours)
