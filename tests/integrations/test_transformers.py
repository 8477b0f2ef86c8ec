"""Models of transformers on attnlib's core, against the same weights on transformers' own eager attention."""

import copy

import pytest
import torch
from families import DECODERS, recent, small

from attnlib.integrations import transformers as hf
from attnlib.integrations.transformers import attention, masks
from attnlib.internal.padding import edges_of

hf.register()


GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 60}
GREEDY |= {"output_logits": True, "return_dict_in_generate": True, "disable_compile": True}
WAYS = ("attention", "layers")  # of attnlib: called by the model's own layers, or with them


@pytest.fixture(params=[(family, way) for way in WAYS for family in DECODERS] + recent(WAYS), ids="-".join)
def pair(request):
    """A small model of a family with random weights, on eager attention and on attnlib's."""
    return both(*request.param)


def both(family: str, way: str = "attention"):
    torch.manual_seed(0)
    eager = small(family).eval()
    ours = copy.deepcopy(eager)
    for model, name in ((eager, "eager"), (ours, "attnlib")):
        model.set_attn_implementation(name)
    return eager, hf.replace(ours) if way == "layers" else ours


def tokens(model, b: int = 2, s: int = 23):
    return torch.randint(3, model.config.get_text_config().vocab_size, (b, s))


def agree(ours, theirs, where=slice(None)):
    torch.testing.assert_close(ours[where], theirs[where], rtol=2e-5, atol=2e-5)


def agree_in_gradients(ours, eager):
    """Compare the gradients of a function of the logits."""
    ids = tokens(eager)
    for model in (eager, ours):
        model(ids).logits.sin().sum().backward()
    compare_gradients(ours, eager)


def compare_gradients(ours, eager):
    """Compare the gradients that two models have, by the names of weights."""
    mine, theirs = gradients(ours), gradients(eager)
    assert mine.keys() == theirs.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def agree_in_generation(ours, eager, given):
    """Compare the tokens and logits of rows of which some have padding on the left."""
    ids, mask = tokens(eager, 3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, :4], mask[1, :9] = 0, 0
    theirs = eager.generate(ids, attention_mask=mask, **GREEDY)
    mine = ours.generate(ids, attention_mask=mask, **GREEDY, **given)
    assert torch.equal(mine.sequences, theirs.sequences)
    agree(torch.stack(mine.logits), torch.stack(theirs.logits))


def test_logits_and_gradients(pair):
    eager, ours = pair
    ids = tokens(eager)
    outputs = [model(ids).logits for model in pair]
    agree(*outputs[::-1])
    weights = torch.randn_like(outputs[0])
    for x in outputs:
        (x * weights).sum().backward()
    compare_gradients(ours, eager)


@torch.no_grad()
def gradients(model) -> dict:
    """The gradients in the places of the weights, by transformers' names and in their shapes."""
    for p in model.parameters():
        p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    return model.state_dict()


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@torch.no_grad()
def test_padding(pair, side):
    ids, mask = tokens(pair[0], 3), torch.ones(3, 23, dtype=torch.long)
    if side == "left":
        mask[0, :5], mask[1, :17] = 0, 0
    elif side == "right":
        mask[0, -5:], mask[1, -17:] = 0, 0
    else:
        mask[0, 3:7], mask[1, 9] = 0, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    theirs, mine = (model(ids, attention_mask=mask, position_ids=positions).logits for model in pair)
    agree(mine, theirs, mask.bool())


@torch.no_grad()
def test_packed_positions(pair):
    """Positions that begin again tell sequences of a row apart."""
    ids, lengths = tokens(pair[0], 2), ((5, 7, 11), (20, 3))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    theirs, mine = (model(ids, position_ids=positions, use_cache=False).logits for model in pair)
    agree(mine, theirs)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_generated_tokens(pair, cache):
    """Of a batch that is padded on the left, token by token."""
    ids, mask = tokens(pair[0], 3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, :4], mask[1, :9] = 0, 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "do_sample": False,
        "cache_implementation": cache,
    }
    options |= {
        "disable_compile": True,
        "pad_token_id": 0,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    theirs, mine = (model.generate(ids, **options, eos_token_id=-1) for model in pair)
    assert torch.equal(mine.sequences, theirs.sequences)
    agree(torch.stack(mine.logits), torch.stack(theirs.logits))


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_static_cache_in_a_compiled_step(way):
    """Its masks are made outside the step, and again within."""
    torch._dynamo.reset()  # of other models' steps, which count as recompiles
    pair = both("qwen3", way)
    ids, mask = tokens(pair[0], 3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, :4], mask[1, 5] = 0, 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": 60,
    }
    theirs = pair[0].generate(ids, **options)
    pair[1].forward = torch.compile(pair[1].forward, fullgraph=True, backend="eager")
    mine = pair[1].generate(ids, **options, cache_implementation="static", disable_compile=True)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma3_text",
        "deepseek_v3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("laguna", "qwen3_vl_text", "gemma4_text")),
    ],
)
def test_training_compiled_as_a_whole(family, way):
    torch.compiler.reset()  # other models of this process have the same code
    pair = both(family, way)
    ids, mask = tokens(pair[0]), torch.ones(2, 23, dtype=torch.long)
    mask[0, -5:] = 0
    compiled = torch.compile(pair[1], fullgraph=True, backend="aot_eager")
    for given in ({}, {"attention_mask": mask}):
        losses = [model(ids, labels=ids, use_cache=False, **given).loss for model in (pair[0], compiled)]
        grads = [
            torch.autograd.grad(x, m.get_input_embeddings().weight) for x, m in zip(losses, pair, strict=True)
        ]
        torch.testing.assert_close(*grads[::-1], rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_beams_and_an_assistant(pair):
    """An assistant that errs, since its weights are others."""
    eager, ours = pair
    assistant = copy.deepcopy(ours)
    for x in assistant.parameters():
        x.add_(0.02 * torch.randn_like(x))
    ids = tokens(eager, 1, 9)
    ways = [{"num_beams": 3}, {"assistant_model": assistant}]
    # Phi 3 begins anew where its rope changes, with a cache that keeps no past; recurrent states keep none.
    if eager.config.model_type in ("phi3", "minimax") or eager._is_stateful:
        ways.pop()
    for options in ways:
        options |= {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
        theirs, mine = (model.generate(ids, **options) for model in pair)
        assert torch.equal(mine, theirs), next(iter(options))


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_of_layers(way):
    """Recomputed layers give the gradients of kept ones."""
    _, model = both("llama", way)
    ids, grads = tokens(model), []
    for recomputed in (False, True):
        if recomputed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
        loss = model(ids, labels=ids, use_cache=False).loss
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    for x, y in zip(*grads, strict=True):
        assert torch.equal(x, y)


@torch.no_grad()
def test_half_precision_is_no_worse_than_theirs(pair):
    """Against fp32, beside which both err a thousand times more."""
    eager, ours = pair
    if any("experts" in name or "indexer" in name for name, _ in eager.named_parameters()):
        pytest.skip("a token that goes to another expert, or sees another key, hides what attention loses")
    torch.manual_seed(1)
    ids = tokens(eager, 6)
    exact = eager(ids).logits.double()
    theirs, mine = ((model.bfloat16()(ids).logits.double() - exact).norm() for model in (eager, ours))
    assert mine <= 1.1 * theirs


@torch.no_grad()
def test_bounds_are_found_once_for_all_layers(monkeypatch):
    _, ours = both("llama")
    found = []
    for module in (attention, masks):
        monkeypatch.setattr(module, "edges_of", lambda mask: found.append(mask) or edges_of(mask))
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[0, :5] = 0
    ours(tokens(ours), attention_mask=mask)
    assert len(found) == 1


@pytest.mark.parametrize("way", WAYS)
def test_flags_of_a_collator(way):
    """Offsets of packed sequences are taken as they are."""
    eager, ours = both("llama", way)
    ids, lengths = tokens(eager, 1), (5, 7, 11)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 11, "max_length_k": 11}
    options = {"position_ids": positions, "use_cache": False}
    agree(ours(ids, **options, **packed).logits, eager(ids, **options).logits)
