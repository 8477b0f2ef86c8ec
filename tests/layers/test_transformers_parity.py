"""The same weights give the same outputs and gradients as the attention modules of transformers."""

from typing import NamedTuple

import pytest
import torch
from layer_helpers import HIDDEN, assert_twice_as_good, gradients
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.stablelm import modeling_stablelm

from attnlib import CAUSAL, GroupedQueryAttention, MultiHeadLatentAttention, Rope, sliding
from attnlib.rope.rope import LinearScaling, Llama3Scaling, YaRNScaling

WINDOW = 5
HEADS = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2}
FAR = (0, 1, 4096, 100_000)


class Theirs(NamedTuple):
    """A module of transformers, its rotary embedding, and the mask its model would hand it."""

    attention: nn.Module
    rotary: nn.Module
    windowed: bool

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        make = create_sliding_window_causal_mask if self.windowed else create_causal_mask
        rows = torch.arange(x.shape[1]).expand(x.shape[:2])
        mask = make(self.attention.config, x, None, None, rows)  # the fourth is the cache, which was renamed
        return self.attention(x, position_embeddings=self.angles(x, positions), attention_mask=mask)[0]

    def angles(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines with their amplitude, which fp64 x gets without a rounding to fp32."""
        amplitude = self.rotary.attention_scaling
        self.rotary.attention_scaling = 1.0 if x.dtype == torch.float64 else amplitude
        cos, sin = self.rotary(x, positions)
        self.rotary.attention_scaling = amplitude
        return (cos * amplitude, sin * amplitude) if x.dtype == torch.float64 else (cos, sin)


def theirs(module, name: str, config, *, layer: int = 0, windowed: bool = False) -> Theirs:
    torch.manual_seed(1)
    attention = getattr(module, f"{name}Attention")(config, layer)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    return Theirs(attention.eval(), getattr(module, f"{name}RotaryEmbedding")(config), windowed)


def configured(kind, rope_parameters: dict | None = None, **options):
    rope = {"rope_type": "default", "rope_theta": 10_000.0} | (rope_parameters or {})
    return kind(attn_implementation="eager", rope_parameters=rope, **HEADS | options)


def yarn(**options) -> dict:
    return {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
    } | options


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def llama(scaling=None, theta: float = 10_000.0, **rope_parameters):
    config = configured(LlamaConfig, rope_parameters | {"rope_theta": theta}, max_position_embeddings=256)
    ours = {"num_kv_heads": 2, "mask": CAUSAL, "rope": Rope(6, theta, scaling)}
    return theirs(modeling_llama, "Llama", config), ours


def llama_biased():
    config = configured(LlamaConfig, attention_bias=True, head_dim=8)
    ours = {"num_kv_heads": 2, "head_dim": 8, "bias": True, "mask": CAUSAL, "rope": Rope(8)}
    return theirs(modeling_llama, "Llama", config), ours


def qwen2():
    ours = {"num_kv_heads": 2, "bias": True, "output_bias": False, "mask": CAUSAL, "rope": Rope(6)}
    return theirs(modeling_qwen2, "Qwen2", configured(Qwen2Config)), ours


def qwen3():
    config = configured(Qwen3Config, head_dim=10, rms_norm_eps=1e-4)
    ours = {
        "num_kv_heads": 2,
        "head_dim": 10,
        "qk_norm": True,
        "norm_eps": 1e-4,
        "mask": CAUSAL,
        "rope": Rope(10),
    }
    return theirs(modeling_qwen3, "Qwen3", config), ours


def stablelm(scaling=None, **rope_parameters):
    """Four of six channels rotate, so YaRN's temperature is on those alone."""
    config = configured(StableLmConfig, rope_parameters | {"partial_rotary_factor": 0.67})
    ours = {"num_kv_heads": 2, "mask": CAUSAL, "rope": Rope(4, scaling=scaling)}
    return theirs(modeling_stablelm, "StableLm", config), ours


def mistral():
    config = configured(MistralConfig, sliding_window=WINDOW, head_dim=8)
    ours = {"num_kv_heads": 2, "head_dim": 8, "mask": sliding(WINDOW), "rope": Rope(8)}
    return theirs(modeling_mistral, "Mistral", config, windowed=True), ours


def gpt_oss(layer: int):
    config = configured(
        GptOssConfig, yarn(truncate=False), head_dim=8, sliding_window=WINDOW, num_hidden_layers=2
    )
    ours = {
        "num_kv_heads": 2,
        "head_dim": 8,
        "bias": True,
        "sinks": True,
        "mask": sliding(WINDOW) if layer == 0 else CAUSAL,
        "rope": Rope(8, scaling=YaRNScaling(4.0, 64, truncate=False)),
    }
    return theirs(modeling_gpt_oss, "GptOss", config, layer=layer, windowed=layer == 0), ours


def gemma2(layer: int):
    scalar, cap = 10, 2.0
    config = configured(
        Gemma2Config,
        head_dim=8,
        query_pre_attn_scalar=scalar,
        attn_logit_softcapping=cap,
        sliding_window=WINDOW,
        num_hidden_layers=2,
    )
    mask = sliding(WINDOW) if layer == 0 else CAUSAL
    ours = {
        "num_kv_heads": 2,
        "head_dim": 8,
        "softcap": cap,
        "scale": scalar**-0.5,
        "mask": mask,
        "rope": Rope(8),
    }
    return theirs(modeling_gemma2, "Gemma2", config, layer=layer, windowed=layer == 0), ours


GROUPED = {
    "llama": lambda: llama(),
    "llama-linear": lambda: llama(LinearScaling(4.0), rope_type="linear", factor=4.0),
    "llama-llama3": lambda: llama(
        Llama3Scaling(**LLAMA3, original_max_position=64),
        theta=500.0,
        rope_type="llama3",
        original_max_position_embeddings=64,
        **LLAMA3,
    ),
    "llama-yarn": lambda: llama(YaRNScaling(4.0, 64), **yarn()),
    "llama-bias-head_dim": llama_biased,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "stablelm": lambda: stablelm(),
    "stablelm-yarn": lambda: stablelm(YaRNScaling(4.0, 64), **yarn()),
    "mistral": mistral,
    "gpt-oss-window": lambda: gpt_oss(0),
    "gpt-oss-full": lambda: gpt_oss(1),
    "gemma2-window": lambda: gemma2(0),
    "gemma2-full": lambda: gemma2(1),
}


@pytest.fixture
def exact(monkeypatch):
    """Let transformers keep fp64: its softmax and its norms round to fp32 on the way."""
    softmax = nn.functional.softmax

    def wide_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype)

    def wide_norm(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * scaled.to(x.dtype)

    monkeypatch.setattr(nn.functional, "softmax", wide_softmax)
    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", wide_norm)
    monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3RMSNorm, "forward", wide_norm)


def compare(reference: Theirs, layer: nn.Module, positions: Tensor) -> None:
    """fp64 to rounding; fp32 with at most twice transformers' own error, gradients three times."""
    frequencies = layer.rope.inverse_frequencies()
    # Up to 4 ulps apart (see rope/test_rope.py), which position 100_000 would turn into the largest error
    # here.
    torch.testing.assert_close(frequencies, reference.rotary.inv_freq, rtol=5e-7, atol=0)
    reference.rotary.inv_freq = frequencies
    layer.load_state_dict(reference.attention.state_dict(), strict=True)
    x = torch.randn(*positions.shape, HIDDEN, generator=torch.Generator().manual_seed(2))
    single = (
        gradients(layer, x, lambda x: layer(x, positions=positions)),
        gradients(reference.attention, x, lambda x: reference(x, positions)),
    )
    layer.double(), reference.attention.double()
    ours = gradients(layer, x.double(), lambda x: layer(x, positions=positions))
    truth = gradients(reference.attention, x.double(), lambda x: reference(x, positions))
    for name, value in truth.items():
        bound = 1e-12 * value.abs().max().item()
        torch.testing.assert_close(
            ours[name], value, rtol=1e-11, atol=bound, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert_twice_as_good({"out": single[0]["out"]}, {"out": single[1]["out"]}, {"out": truth["out"]})
    assert_twice_as_good(*single, truth, factor=3)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("case", GROUPED)
def test_a_grouped_layer_equals_transformers(case):
    reference, options = GROUPED[case]()
    layer = GroupedQueryAttention(HIDDEN, 4, **options)
    positions = torch.stack((torch.arange(9), torch.arange(9) + 50))
    compare(reference, layer, positions)


MLA = {
    "direct-q": ({"q_lora_rank": None}, {}, None),
    "q-lora": ({"q_lora_rank": 10}, {}, None),
    "bias": ({"q_lora_rank": 10, "attention_bias": True}, {}, None),
    "half-rope": ({"q_lora_rank": 10, "rope_interleave": False}, {}, None),
    "yarn": ({"q_lora_rank": 10}, yarn(), YaRNScaling(4.0, 64)),
    "yarn-equal-mscale": (
        {"q_lora_rank": 10},
        yarn(mscale=0.7, mscale_all_dim=0.7),
        YaRNScaling(4.0, 64, mscale=0.7, mscale_all_dim=0.7),
    ),
    "yarn-two-mscales": (
        {"q_lora_rank": None},
        yarn(mscale=1.3, mscale_all_dim=0.6),
        YaRNScaling(4.0, 64, mscale=1.3, mscale_all_dim=0.6),
    ),
    "yarn-factor-1": (
        {"q_lora_rank": None},
        yarn(factor=1.0, mscale=1.3, mscale_all_dim=0.6),
        YaRNScaling(1.0, 64, mscale=1.3, mscale_all_dim=0.6),
    ),
    "yarn-one-mscale": (
        {"q_lora_rank": None},
        yarn(mscale_all_dim=0.6),
        YaRNScaling(4.0, 64, mscale_all_dim=0.6),
    ),
}


def deepseek(case: str) -> tuple[Theirs, dict]:
    options, rope_parameters, scaling = MLA[case]
    sizes = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5}
    config = configured(DeepseekV3Config, rope_parameters, num_key_value_heads=4, **sizes, **options)
    rope = Rope(8, scaling=scaling, interleaved=options.get("rope_interleave", True))
    ours = {"q_lora_rank": options["q_lora_rank"], "bias": options.get("attention_bias", False), "rope": rope}
    return theirs(modeling_deepseek_v3, "DeepseekV3", config), ours | sizes


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("case", MLA)
def test_a_latent_layer_equals_transformers(case, form):
    reference, options = deepseek(case)
    layer = MultiHeadLatentAttention(HIDDEN, 4, mask=CAUSAL, form=form, **options)
    compare(reference, layer, torch.tensor([FAR, [n + 1 for n in FAR[::-1]]]))  # 0 would begin again
