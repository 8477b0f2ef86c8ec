"""Models of transformers that attnlib's attention refuses, and those that it warns of."""

import copy
import warnings
from contextlib import suppress

import pytest
import torch
from families import CACHE, SIZES, lively, small
from own_model import MASKS, OwnConfig, OwnModel
from small_configs import small_config
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BigBirdPegasusForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    CodeGenConfig,
    CodeGenForCausalLM,
    DynamicCache,
    EncoderDecoderCache,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoXJapaneseConfig,
    GPTNeoXJapaneseForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NllbMoeForConditionalGeneration,
    PegasusXForConditionalGeneration,
    PreTrainedModel,
    SamVisionConfig,
    SamVisionModel,
    TrOCRConfig,
    TrOCRForCausalLM,
)
from transformers.models.llama.modeling_llama import (
    ALL_ATTENTION_FUNCTIONS,
    LlamaPreTrainedModel,
    eager_attention_forward,
)

from attnlib.integrations import transformers as hf
from attnlib.integrations.transformers import choosing
from attnlib.integrations.transformers.attention import attention_forward
from attnlib.integrations.transformers.handed import handed

hf.register()
UNSUPPORTED = {
    BloomForCausalLM: BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4),
    CodeGenForCausalLM: CodeGenConfig(
        vocab_size=61, n_embd=32, n_layer=1, n_head=4, n_positions=64, rotary_dim=4
    ),
    FalconForCausalLM: FalconConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    ),
    GPTNeoXJapaneseForCausalLM: GPTNeoXJapaneseConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1),
    TrOCRForCausalLM: TrOCRConfig(vocab_size=61, d_model=32, decoder_layers=1, decoder_attention_heads=4),
    SamVisionModel: SamVisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=32
    ),
}


@pytest.mark.parametrize("kind", [kind for kind in UNSUPPORTED if not kind._supports_attention_backend])
def test_a_class_without_backends_is_refused_by_name(kind):
    with pytest.raises(
        NotImplementedError, match=f'{kind.__name__}.*: attn_implementation="attnlib" is refused, since'
    ):
        kind._from_config(copy.deepcopy(UNSUPPORTED[kind]), attn_implementation="attnlib")


def test_it_is_refused_when_chosen_later():
    """transformers itself writes a line into its log, and goes on with the other attention."""
    model = BloomForCausalLM(copy.deepcopy(UNSUPPORTED[BloomForCausalLM]))
    with pytest.raises(NotImplementedError, match=r"BloomForCausalLM: .* is refused"):
        model.set_attn_implementation("attnlib")


@torch.no_grad()
def test_without_the_private_contract_the_masks_refuse():
    model = BloomForCausalLM(copy.deepcopy(UNSUPPORTED[BloomForCausalLM]))
    model.config._attn_implementation_internal = "attnlib"  # as it is set where nobody looks
    with pytest.raises(NotImplementedError, match=r"Bloom.* is refused"):
        model(torch.randint(3, 61, (2, 7)))


@pytest.mark.parametrize("change", ["missing", "never called"])
def test_another_contract_is_left_as_it_was(monkeypatch, change):
    """If transformers chooses in a way that attnlib does not know, nothing is wrapped."""
    given = PreTrainedModel.get_correct_attn_implementation.__wrapped__
    monkeypatch.setattr(PreTrainedModel, "get_correct_attn_implementation", given)
    monkeypatch.setattr(
        PreTrainedModel, "set_attn_implementation", PreTrainedModel.set_attn_implementation.__wrapped__
    )
    if change == "missing":
        monkeypatch.delattr(PreTrainedModel, "get_correct_attn_implementation")
    else:
        monkeypatch.setattr(
            PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, *args, **kwargs: "sdpa"
        )
    assert not choosing.watch_choices("attnlib", pytest.fail)
    if change != "missing":
        assert PreTrainedModel.get_correct_attn_implementation is given


# Tensors


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks", "anything"])
@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: [x], lambda x: {"a": (x,)}], ids=["tensor", "list", "dict"]
)
def test_an_unknown_tensor_is_refused(name, wrap):
    q = torch.randn(1, 2, 3, 8)
    attention_forward(nn.Module(), q, q, q, None, **{name: None})
    with pytest.raises(
        NotImplementedError,
        match=rf"{name}: (expected .* for queries of|attn_implementation=.* does not read)",
    ):
        attention_forward(nn.Module(), q, q, q, None, **{name: wrap(torch.ones(2))})


def test_gradient_accumulation_by_a_trainer(tmp_path):
    """The Trainer hands on how many tokens there are, as a tensor that reaches attention."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    models = [small("llama"), small("llama")]
    models[1].load_state_dict(models[0].state_dict())
    rows = [{"input_ids": x, "labels": x} for x in torch.randint(3, 61, (8, 11))]
    for name, model in zip(("eager", "attnlib"), models, strict=True):
        model.set_attn_implementation(name)
        asked = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2,
            max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
            learning_rate=1e-2,
        )  # fmt: skip
        Trainer(model=model, args=asked, train_dataset=rows).train()
    for theirs, mine in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


# Masks


def changed_by(monkeypatch, change):
    """A Llama whose layers do something to what attention gets."""
    from transformers.models.llama import modeling_llama

    from attnlib.integrations.transformers.doors import registered_functions

    attend = registered_functions().attend

    def other(module, query, key, value, attention_mask, **kwargs):
        return attend(module, *change(query, key, value, attention_mask), **kwargs)

    model = small("llama")
    model.set_attn_implementation("attnlib")
    monkeypatch.setattr(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: other)
    return model


@pytest.mark.parametrize("side", [None, "left"])
@torch.no_grad()
def test_other_keys_than_the_mask_was_asked_for_are_refused(monkeypatch, side):
    model = changed_by(
        monkeypatch, lambda q, k, v, mask: (q, torch.cat([k, k[:, :, :2]], 2), v.repeat(1, 1, 2, 1), mask)
    )
    padding = half_padded() if side else torch.ones(2, 9, dtype=torch.long)
    with pytest.raises(NotImplementedError, match=r"LlamaAttention: expected as many keys .*\[9\].*got 11"):
        model(torch.randint(3, 61, (2, 9)), attention_mask=padding)


def half_padded() -> torch.Tensor:
    padding = torch.ones(2, 9, dtype=torch.long)
    padding[0, :3] = 0
    return padding


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask[:, :, :, :9],
        lambda mask: mask + torch.arange(9.0)[None, None, None],
        lambda mask: torch.cat([mask[:, :, :4], mask[:, :, 4:]], 2),
    ],
    ids=["sliced", "added", "joined"],
)
@torch.no_grad()
def test_a_model_that_computes_with_its_mask_gets_that_of_eager(monkeypatch, change):
    """As Pix2Struct and BigBird-Pegasus."""
    eager, ids, padding = small("llama"), torch.randint(3, 61, (2, 9)), half_padded()
    ours = changed_by(monkeypatch, lambda q, k, v, mask: (q, k, v, change(mask)))
    ours.load_state_dict(eager.state_dict())
    eager.set_attn_implementation("eager")
    found = ours(ids, attention_mask=padding).logits
    attend = eager_attention_forward
    monkeypatch.setattr(
        ALL_ATTENTION_FUNCTIONS, "get_interface",
        lambda *_: lambda module, q, k, v, mask, **options: attend(module, q, k, v, change(mask), **options),
    )  # fmt: skip
    torch.testing.assert_close(
        found[padding.bool()], eager(ids, attention_mask=padding).logits[padding.bool()]
    )


def written(mask):
    mask[:, :, :, 0] = 0
    return mask


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask + torch.zeros(2, 1, 9, 9).to(mask.dtype),
        lambda mask: torch.cat([mask, mask[:, :1]], -1)[:, 1:],
        written,
    ],
    ids=["cast", "moved", "written"],
)
@torch.no_grad()
def test_a_model_that_computes_with_another_mask_is_refused(monkeypatch, change):
    """As DeepSeek V4, whose layers join what they cast to the mask's dtype."""
    model = changed_by(monkeypatch, lambda q, k, v, mask: (q, k, v, change(mask)))
    with pytest.raises(NotImplementedError, match='attn_implementation="attnlib"'):
        model(torch.randint(3, 61, (2, 9)), attention_mask=half_padded())


def test_a_mask_that_is_moved_stays_what_it_is():
    mask = handed(torch.ones(2, 5, dtype=torch.bool), meaning="causal", keys=5)
    for same in (mask.to(torch.bool), mask.contiguous(), mask.clone(), mask.detach()):
        assert (same.meaning, same.keys, same.is_changed) == ("causal", 5, False)


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_mask_says_more_than_the_flags_of_a_module(padded):
    """As PaliGemma's, whose layers say that they are not causal, under masks that are."""
    torch.manual_seed(0)
    eager = small("llama").eval()
    ours = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation("attnlib")
    for layer in ours.model.layers:
        layer.self_attn.is_causal = False
    ids, mask = torch.randint(3, 61, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    if padded:
        mask[0, :4] = 0
    torch.testing.assert_close(
        ours(ids, attention_mask=mask).logits[mask.bool()],
        eager(ids, attention_mask=mask).logits[mask.bool()],
    )


def pair(make, *args) -> list[nn.Module]:
    """Return a model on ``eager`` and one on attnlib, with the same weights."""
    models = []
    for name in ("eager", "attnlib"):
        torch.manual_seed(0)
        models.append(make(*args, attn_implementation=name).eval())
    return models


@pytest.mark.parametrize("hands_window", [False, True])
@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("masks", MASKS)
@torch.no_grad()
def test_a_users_own_model_agrees_or_is_refused(masks, flag, hands_window):
    """Flags may contradict masks; None is full attention for ``eager``, and causal attention for others."""
    eager, ours = pair(OwnModel._from_config, OwnConfig(masks=masks, flag=flag, hands_window=hands_window))
    for s, start in ((13, 0), (9, 0), (13, 4), (1, 0)):
        ids, padding = torch.randint(3, 61, (2, s)), torch.ones(2, s, dtype=torch.long)
        padding[0, :start] = 0
        with suppress(NotImplementedError):
            found = ours(ids, attention_mask=padding)
            torch.testing.assert_close(
                found[padding.bool()], eager(ids, attention_mask=padding)[padding.bool()]
            )
            continue
        assert (masks == "nothing" and flag is not False) or ("window" in masks and not hands_window)


@pytest.mark.parametrize("tokens", [9, 7])
@torch.no_grad()
def test_cross_attention_is_none_of_the_models_own(tokens):
    """Also to as many tokens, or to a number that a mask was made for before."""
    sizes = {"is_decoder": True, "add_cross_attention": True, "initializer_range": 0.3}
    eager, ours = pair(BertLMHeadModel._from_config, BertConfig(**SIZES | sizes))
    ids, encoded = torch.randint(3, 61, (1, 9)), torch.randn(1, 9, 32)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for part in (ids[:, :2], ids[:, 2:]):
        ours(part, encoder_hidden_states=encoded[:, :3], **{CACHE: cache})
    theirs, mine = (x(ids[:, :tokens], encoder_hidden_states=encoded).logits for x in (eager, ours))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "kind", [BigBirdPegasusForCausalLM, NllbMoeForConditionalGeneration, PegasusXForConditionalGeneration]
)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@torch.no_grad()
def test_compiled_models_whose_flags_say_nothing(kind):
    torch._dynamo.reset()
    config = small_config(kind.config_class, 1)
    eager, ours = (lively(x) for x in pair(kind._from_config, config))
    ours.load_state_dict(eager.state_dict())
    ids = {name: torch.randint(3, 61, (1, 13)) for name in ("input_ids", "decoder_input_ids")}
    if not config.is_encoder_decoder or kind is BigBirdPegasusForCausalLM:
        ids.pop("decoder_input_ids")
    torch.testing.assert_close(torch.compile(ours, backend="eager")(**ids).logits, eager(**ids).logits)


# Warnings


class Apart(LlamaPreTrainedModel):
    """A model whose flag says that its attention can be exchanged, which it does not look up."""

    def __init__(self, config):
        super().__init__(config)
        self.self_attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.post_init()

    def forward(self, x):
        return self.self_attention(x, x, x)[0]


def test_attention_that_never_came_is_warned_of_once():
    x = torch.randn(1, 5, 32)
    for n in range(2):
        model = lively(Apart._from_config(LlamaConfig(**SIZES), attn_implementation="attnlib"))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                copy.deepcopy(model)(x)
                model(x)
        assert [str(x.message)[:5] for x in told] == ["Apart"][n:]


def test_a_forward_that_raises_is_no_first_forward():
    model = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="attnlib")
    with pytest.raises(ValueError, match="You must specify exactly one"):
        model()
    model(torch.randint(3, 61, (1, 5)))  # which does not warn
