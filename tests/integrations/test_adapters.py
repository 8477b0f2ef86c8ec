"""LoRA by PEFT on replaced models: trained, saved and loaded, merged, and decoded with."""

import copy

import pytest
import torch
from families import CACHE, small

from attnlib.integrations import transformers as hf
from tests.integrations.test_transformers import agree, tokens

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # which PEFT still asks for
GROUPED = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {
    "llama": GROUPED,
    "gpt2": GROUPED,  # whose own are one
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}


@pytest.fixture(params=TARGETS)
def adapted(request):
    """A replaced model, and one with an adapter that does something."""
    torch.manual_seed(0)
    base = hf.replace(small(request.param)).eval()
    config = peft.LoraConfig(target_modules=TARGETS[request.param], r=4, init_lora_weights=False)
    return copy.deepcopy(base), peft.get_peft_model(base, config).eval()


def test_gradients_reach_adapters_alone(adapted):
    base, model = adapted
    ids = tokens(base)
    assert (model(ids).logits - base(ids).logits).abs().max() > 0.1
    model(ids, labels=ids).loss.backward()
    for name, x in model.named_parameters():
        assert x.requires_grad == ("lora" in name)
        assert (x.grad is not None and x.grad.any()) == x.requires_grad, name


@torch.no_grad()
def test_an_adapter_is_saved_and_loaded(adapted, tmp_path):
    base, model = adapted
    ids = tokens(base)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(peft.PeftModel.from_pretrained(base, tmp_path).eval()(ids).logits, expected)


@torch.no_grad()
def test_an_adapter_is_merged(adapted):
    """Into weights that are saved by transformers' names."""
    base, model = adapted
    ids = tokens(base)
    expected, names = model(ids).logits, list(base.state_dict())
    merged = model.merge_and_unload()
    agree(merged(ids).logits, expected)
    assert list(merged.state_dict()) == names


@torch.no_grad()
def test_pages(adapted):
    """Up-projections with an adapter are not absorbed."""
    _, model = adapted
    ids = tokens(model.base_model.model, 2, 9)
    cache = hf.PagedCache(model.base_model.model, pages=64, page_size=4, max_sequences=4)
    with_pages = model.generate(input_ids=ids, **{CACHE: cache}, **OPTIONS)
    assert torch.equal(with_pages, model.generate(input_ids=ids, **OPTIONS))
