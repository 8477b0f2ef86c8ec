"""With output_attentions=True, transformers models return the weights that eager attention returns."""

import pytest
import torch
from families import CACHE, DECODERS
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSeq2SeqLM, DynamicCache

from attnlib.integrations import transformers as hf
from attnlib.integrations.transformers.attention import attention_forward
from tests.integrations import test_encoders as encoders
from tests.integrations.test_transformers import agree, both, tokens

# Their attention modules do not get the argument, so transformers itself collects None.
UNASKED = {"gpt2", "opt"}
ASKED = [family for family in DECODERS if family not in UNASKED]
GENERATING = [x for x in ("llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3") if x in DECODERS]


def rows_agree(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], seen: Tensor) -> None:
    """Equal for the queries ``seen`` ``[b, s]``; with eager attention, others see everything."""
    assert len(ours) == len(theirs) > 0
    for x, y in zip(ours, theirs, strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        agree(x.transpose(1, 2), y.transpose(1, 2), seen)


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("family", ASKED)
@torch.no_grad()
def test_padded_batches(family, side):
    eager, ours = both(family)
    ids, mask = tokens(eager, 3, 12), torch.ones(3, 12, dtype=torch.long)
    hidden = {"none": slice(0), "left": slice(5), "right": slice(8, 12), "holes": slice(4, 7)}[side]
    mask[1, hidden] = 0
    theirs, mine = (x(ids, attention_mask=mask, output_attentions=True) for x in (eager, ours))
    rows_agree(mine.attentions, theirs.attentions, mask.bool())
    assert ours(ids).attentions is None


@pytest.mark.parametrize("cache", ["dynamic", "static", "pages", "latents"])
@pytest.mark.parametrize("family", GENERATING)
def test_generated_tokens(family, cache):
    eager, ours = both(family)
    is_latent = hasattr(eager.config, "kv_lora_rank")
    if (cache == "latents") != is_latent and cache in ("latents", "pages"):
        pytest.skip("latents are cached by latent layers")
    ids, mask = tokens(eager, 2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    options = {
        "attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "eos_token_id": -1,
        "pad_token_id": 0, "output_attentions": True, "return_dict_in_generate": True,
    }  # fmt: skip
    if cache == "static":
        options["cache_implementation"] = "static"
    theirs = eager.generate(ids, **options)
    if cache == "pages":
        options[CACHE] = hf.PagedCache(ours, pages=96, page_size=4, max_sequences=2)
    mine = (hf.absorb(ours) if cache == "latents" else ours).generate(ids, **options)
    assert torch.equal(mine.sequences, theirs.sequences)
    for step, (x, y) in enumerate(zip(mine.attentions, theirs.attentions, strict=True)):
        if cache == "pages":  # all tokens have a column, also those before a window
            assert not any(layer[..., : -of.shape[-1]].any() for layer, of in zip(x, y, strict=True))
            x = tuple(layer[..., -of.shape[-1] :] for layer, of in zip(x, y, strict=True))
        rows_agree(x, y, mask.bool() if step == 0 else torch.ones(2, 1, dtype=torch.bool))


@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v3"])
@torch.no_grad()
def test_steps_of_several_tokens_over_pages(family):
    eager, ours = both(family)
    ours = hf.absorb(ours) if hasattr(ours.config, "kv_lora_rank") else ours
    ids = tokens(eager, 3, 12)
    caches = DynamicCache(), hf.PagedCache(ours, pages=96, page_size=4, max_sequences=3)
    for part in ids.split((5, 4, 3), 1):
        theirs, mine = (
            x(part, output_attentions=True, **{CACHE: cache}).attentions
            for x, cache in zip((eager, ours), caches, strict=True)
        )
        rows_agree(mine, theirs, torch.ones_like(part).bool())


@pytest.mark.parametrize("family", ["bert", "modernbert"])
@torch.no_grad()
def test_encoders(family):
    config = CONFIG_MAPPING[family](**encoders.ENCODERS[family] | encoders.TOKENS)
    ids, mask = encoders.padded()
    theirs, mine = (
        x(ids, attention_mask=mask, output_attentions=True)
        for x in encoders.both(AutoModel, config, "attention")
    )
    rows_agree(mine.attentions, theirs.attentions, mask.bool())


@pytest.mark.parametrize("family", encoders.BOTH)
@torch.no_grad()
def test_decoders_with_an_encoder(family):
    config = CONFIG_MAPPING[family](**encoders.BOTH[family] | encoders.TOKENS)
    (ids, mask), given = encoders.padded(), torch.randint(3, 61, (3, 6))
    theirs, mine = (
        x(ids, attention_mask=mask, decoder_input_ids=given, output_attentions=True)
        for x in encoders.both(AutoModelForSeq2SeqLM, config, "attention")
    )
    rows_agree(mine.encoder_attentions, theirs.encoder_attentions, mask.bool())
    everything = torch.ones(3, 6, dtype=torch.bool)
    for name in ("decoder_attentions", "cross_attentions"):
        rows_agree(getattr(mine, name), getattr(theirs, name), everything)


@torch.no_grad()
def test_packed_sequences():
    """By positions that begin again, and by offsets as data collators for flash-attn hand them on."""
    eager, ours = both("llama")
    ids, positions = tokens(eager, 1, 12), torch.tensor([[*range(5), *range(7)]])
    theirs = eager(ids, position_ids=positions, use_cache=False, output_attentions=True).attentions
    assert not theirs[0][0, :, 5:, :5].any()
    everything = torch.ones(1, 12, dtype=torch.bool)
    rows_agree(
        ours(ids, position_ids=positions, use_cache=False, output_attentions=True).attentions,
        theirs,
        everything,
    )
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 7, "max_length_k": 7}
    found = ours(ids, position_ids=positions, use_cache=False, output_attentions=True, **given).attentions
    rows_agree(found, theirs, everything)


def test_training():
    """Weights are those before dropout, and a gradient that arrives at them is refused."""
    eager, ours = both("llama")
    ids = tokens(eager, 2, 8)
    expected = eager(ids, output_attentions=True).attentions
    for module in ours.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    found = ours.train()(ids, labels=ids, output_attentions=True)
    agree(found.attentions[0], expected[0])  # the first layer's input has no dropout
    found.loss.backward()
    with pytest.raises(NotImplementedError, match="attention weights: expected no gradient"):
        found.attentions[1].square().sum().backward()


def test_weights_of_half_precision_have_its_dtype():
    q, k = torch.randn(1, 4, 3, 8).bfloat16(), torch.randn(1, 2, 5, 8).bfloat16()
    module = torch.nn.Module()
    module.is_causal = True
    out, weights = attention_forward(module, q, k, k, None, output_attentions=True)
    assert weights.dtype == out.dtype == torch.bfloat16
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=0.02)
    assert attention_forward(module, q, k, k, None)[1] is None


def test_where_they_are_refused():
    _, replaced = both("llama", "layers")
    with pytest.raises(NotImplementedError, match=r"output_attentions: a model with replaced layers"):
        replaced(tokens(replaced), output_attentions=True)
    _, ours = both("deepseek_v3")
    for layer in ours.model.layers:  # with a hook, as adapters have them, latents are expanded
        layer.self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
    cache = hf.PagedCache(hf.absorb(ours), pages=96, page_size=4, max_sequences=2)
    with torch.no_grad():
        assert ours(tokens(ours), output_attentions=True, **{CACHE: cache}).attentions[0].any()
        with pytest.raises(NotImplementedError, match=r"output_attentions: expected pages of keys"):
            ours(tokens(ours, 2, 3), output_attentions=True, **{CACHE: cache})
