"""Two folders compared a layer at a time: as of whole models, for every family, and within little memory."""

import json
import math
import threading

import pytest
import torch
from family_models import ALL, DECODERS, SEEING, SIZES, STREAMED, load, make, says, slow
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, OPTConfig, OPTForCausalLM

from attnlib.checkpoint_files.folder import read_folder
from attnlib.convert.check import comparison
from attnlib.convert.check.comparison import compare
from attnlib.convert.check.divergence import Divergence
from attnlib.convert.check.head import Head
from attnlib.convert.checkpoint.errors import CheckpointError
from attnlib.convert.text.layers import TextLayers

WHOLE = "opt with less to embed"  # which Layers does not run
SEEN = torch.arange(3, 3 + 2 * 11).view(2, 11)
MLA = {
    "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 2, "n_routed_experts": 1, "n_shared_experts": 1, "num_experts_per_tok": 1,
    "n_group": 1, "topk_group": 1, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 61,
    "attention_bias": True,
}  # fmt: skip


def whole():
    """As OPT 350M is, with products before its layers and behind them."""
    torch.manual_seed(0)
    options = SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
    return OPTForCausalLM(OPTConfig(**options)).eval()


def deepseek():
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**MLA))
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.3)
    return model.eval()


OTHERS = {"deepseek_v3": deepseek, WHOLE: whole}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Two folders of a kind with different attention, and what whole models say of SEEN."""
    made = {}

    def pair(kind):
        if kind not in made:
            old, new = (OTHERS[kind]() if kind in OTHERS else make(kind) for _ in range(2))
            with torch.no_grad():
                for name, x in new.named_parameters():
                    if "attn" in name or "attention" in name:
                        x.add_(0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
            folders = [tmp_path_factory.mktemp(kind) / name for name in ("old", "new")]
            for folder, model in zip(folders, (old, new), strict=True):
                model.save_pretrained(folder)
            made[kind] = folders, [says(model).double() for model in (old, new)]
        return made[kind]

    return pair


def measured(old, new, tokens):
    """The measures by their definition, of logits ``[windows, n, words]``."""
    a, b = old.log_softmax(-1), new.log_softmax(-1)
    following = tokens[:, 1:, None]
    before, after = (-x[:, :-1].gather(-1, following).mean() for x in (a, b))
    return {
        "tokens": tokens.numel(),
        "largest_logit": float(old.abs().max()),
        "largest_logit_difference": float((old - new).abs().max()),
        "kl_nats": float((a.exp() * (a - b)).sum(-1).mean()),
        "perplexity_before": math.exp(before),
        "perplexity_after": math.exp(after),
    }


@pytest.mark.parametrize("kind", [*DECODERS, *SEEING, *OTHERS, *slow(*STREAMED)])
def test_it_is_what_whole_models_say(pairs, kind, monkeypatch):
    """Slices that are smaller than the vocabulary and than a window, and end in their middle."""
    (old, new), logits = pairs(kind)
    monkeypatch.setattr(comparison, "WORDS", 13)
    monkeypatch.setattr(comparison, "PLACES", 4)
    if kind != WHOLE:
        monkeypatch.setattr(comparison, "_whole", lambda *_: pytest.fail("a whole model"))
    steps = []
    found = compare(read_folder(old), read_folder(new), SEEN, advance=lambda: steps.append(1))
    wanted = measured(*logits, SEEN)
    assert found == {name: pytest.approx(value, rel=1e-4) for name, value in wanted.items()}
    assert found["largest_logit_difference"] > 0.01 * found["largest_logit"]
    assert len(steps) == (0 if kind == WHOLE else 2 * len(TextLayers(read_folder(old))))


def test_every_family_is_tried():
    assert {*ALL} == {*DECODERS, *SEEING, "bert"}


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "mixtral"])
def test_the_same_is_no_difference(pairs, kind):
    (old, _), _ = pairs(kind)
    found = compare(read_folder(old), read_folder(old), SEEN)
    assert found["largest_logit_difference"] == found["kl_nats"] == 0
    assert found["perplexity_before"] == found["perplexity_after"]


def test_no_bit_depends_on_threads(pairs):
    (old, new), _ = pairs("gemma2")
    threads, found, tokens = torch.get_num_threads(), [], torch.arange(3, 3 + 48).view(3, 16)
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(compare(read_folder(old), read_folder(new), tokens))
    torch.set_num_threads(threads)
    assert found[0] == found[1]


def test_a_model_without_a_head(tmp_path):
    make("bert").save_pretrained(tmp_path)
    assert compare(read_folder(tmp_path), read_folder(tmp_path), SEEN) == comparison.NONE


def test_large_models_that_cannot_be_streamed_are_not_compared(pairs, monkeypatch):
    (old, new), _ = pairs(WHOLE)
    monkeypatch.setattr(comparison, "WHOLE", 1000)
    monkeypatch.setattr(comparison, "_whole", lambda *_: pytest.fail("a large model"))
    assert compare(read_folder(old), read_folder(new), SEEN).startswith("not compared: ")


def test_one_layer_and_some_words_have_weights_at_a_time(pairs, monkeypatch):
    """Of both models together, and neither's decoder while heads have theirs."""
    (old, new), _ = pairs("llama")
    monkeypatch.setattr(comparison, "WORDS", 13)
    streams, heads, held = [], [], []
    layers_of, heads_of = TextLayers.__init__, Head.__init__
    monkeypatch.setattr(TextLayers, "__init__", lambda self, *x: layers_of(self, *x) or streams.append(self))
    monkeypatch.setattr(Head, "__init__", lambda self, *x: heads_of(self, *x) or heads.append(self))
    real = comparison.through

    def through(module, states):
        held.append(
            sum(
                not x.is_meta
                for layers in streams
                for layer in layers._base.layers
                for x in layer.parameters()
            )
        )
        return real(module, states)

    monkeypatch.setattr(comparison, "through", through)
    words = []
    add = Divergence.add
    monkeypatch.setattr(
        Divergence, "add", lambda self, first, x, y: words.append(x.shape[1]) or add(self, first, x, y)
    )
    compare(read_folder(old), read_folder(new), SEEN)
    assert max(held) == len([*streams[0]._base.layers[0].parameters()])
    assert set(words) == {13, 61 % 13}
    assert all(x.shape[0] <= 13 for head in heads for x in head._model.parameters())


def test_logits_of_the_source_that_are_no_numbers(pairs, tmp_path):
    (old, new), _ = pairs("llama")
    copied(old, tmp_path, {"model.norm.weight": lambda x: x.fill_(torch.inf)})
    found = compare(read_folder(tmp_path), read_folder(new), SEEN)
    assert found == "none: the source's logits are not finite"
    assert math.isnan(compare(read_folder(old), read_folder(tmp_path), SEEN)["largest_logit_difference"])


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own_counts_and_else_the_embedding(pairs, tmp_path, tied):
    """As transformers has it, whatever config.json says."""
    (old, _), _ = pairs("llama")
    config = copied(old, tmp_path, {})
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    if tied:
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    states = torch.randn(5, 32)
    with torch.no_grad():
        wanted = (
            load(tmp_path).lm_head(states)
            if tied
            else states @ load_file(old / "model.safetensors")["lm_head.weight"].T
        )
    head = Head.of_checkpoint(read_folder(tmp_path), "cpu")
    head.take(0, 61)
    torch.testing.assert_close(head(states), wanted)


def test_a_head_of_another_size(pairs, tmp_path):
    (old, _), _ = pairs("llama")
    copied(old, tmp_path, {"lm_head.weight": lambda x: x[:-1].clone()})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected \[61, 32\].*got \[60, 32\]"):
        Head.of_checkpoint(read_folder(tmp_path), "cpu")
    copied(old, tmp_path, {"lm_head.weight": None, "model.embed_tokens.weight": None})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected a head, or one embedding"):
        Head.of_checkpoint(read_folder(tmp_path), "cpu")


def test_sums_over_slices_are_those_of_the_whole():
    """With logits so far apart that exponentials overflow and vanish, in every order of their largest."""
    generator = torch.Generator().manual_seed(0)
    old, new = 300 * torch.randn(2, 6, 50, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 49, 7, -1, 30, 12])
    for width in (50, 1, 7):
        divergence = Divergence(targets)
        for first in range(0, 50, width):
            divergence.add(first, old[:, first : first + width], new[:, first : first + width])
        a, b = old.log_softmax(-1), new.log_softmax(-1)
        torch.testing.assert_close(divergence.kl(), (a.exp() * (a - b)).sum(-1))
        rows = targets >= 0
        wanted = torch.stack([-x[rows, targets[rows]] for x in (a, b)])
        torch.testing.assert_close(divergence.lost(), wanted)
        assert divergence.difference == float((old - new).abs().max())


def test_threads_do_not_meet(pairs):
    """Each window is passed on by a thread of its own, without gradients."""
    (old, new), _ = pairs("llama")
    modes = set()
    real = Divergence.add

    def add(self, first, x, y):
        modes.add((threading.current_thread() is threading.main_thread(), x.requires_grad, y.requires_grad))
        real(self, first, x, y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Divergence, "add", add)
        compare(read_folder(old), read_folder(new), SEEN)
    assert modes == {(False, False, False)}


def copied(folder, to, changes):
    """The folder with some tensors changed, or left out; returns its config."""
    tensors = load_file(folder / "model.safetensors")
    for name, change in changes.items():
        x = tensors.pop(name)
        if change is not None:
            tensors[name] = change(x)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    config = (folder / "config.json").read_text()
    (to / "config.json").write_text(config)
    return json.loads(config)
