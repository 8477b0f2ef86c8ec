"""A model as a user writes it over transformers' interface of attention, with masks of several kinds."""

import copy
from collections.abc import Callable

import torch
from families import CACHE
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward


class OwnConfig(PreTrainedConfig):
    model_type = "own"
    hidden_size: int = 32
    num_attention_heads: int = 4
    num_hidden_layers: int = 2
    sliding_window: int = 5
    masks: str = "causal"  # a name of MASKS
    flag: bool | None = None  # what layers say; None: nothing
    hands_window: bool = False


def given(config: OwnConfig, x: Tensor, padding: Tensor | None) -> dict:
    return {"config": config, "inputs_embeds": x, "attention_mask": padding}


def causal(config: OwnConfig, x: Tensor, padding: Tensor | None) -> Tensor | None:
    return create_causal_mask(**given(config, x, padding), **{CACHE: None})


def both_ways(config: OwnConfig, x: Tensor, padding: Tensor | None) -> Tensor | None:
    return create_bidirectional_mask(**given(config, x, padding))


def window(config: OwnConfig, x: Tensor, padding: Tensor | None) -> Tensor | None:
    return create_sliding_window_causal_mask(**given(config, x, padding), **{CACHE: None})


def of_a_copy(config: OwnConfig, x: Tensor, padding: Tensor | None) -> Tensor | None:
    return causal(copy.deepcopy(config), x, padding)


def nothing(config: OwnConfig, x: Tensor, padding: Tensor | None) -> None:
    return None


MASKS: dict[str, tuple[Callable, Callable]] = {  # of the two layers
    "causal": (causal, causal),
    "both ways": (both_ways, both_ways),
    "window": (window, window),
    "causal, then both ways": (causal, both_ways),
    "both ways, then a window": (both_ways, window),
    "causal, then a window": (causal, window),
    "of a copy": (of_a_copy, of_a_copy),
    "nothing": (nothing, nothing),
}


class OwnAttention(nn.Module):
    def __init__(self, config: OwnConfig):
        super().__init__()
        self.config, self.num_key_value_groups = config, 1
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        if config.flag is not None:
            self.is_causal = config.flag

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        (b, s, _), options = x.shape, {"scaling": 0.3, "dropout": 0.0}
        if self.config.hands_window:
            options["sliding_window"] = self.config.sliding_window
        q, k, v = self.qkv(x).view(b, s, 3, 4, 8).permute(2, 0, 3, 1, 4)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        return self.out(attend(self, q, k, v, mask, **options)[0].reshape(b, s, 32))


class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    _supports_attention_backend = _supports_sdpa = True

    def __init__(self, config: OwnConfig):
        super().__init__(config)
        self.embed = nn.Embedding(61, 32)
        self.layers = nn.ModuleList(OwnAttention(config) for _ in range(2))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        for x in module.parameters(recurse=False):
            torch.nn.init.normal_(x, std=0.4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        masks = [make(self.config, x, attention_mask) for make in MASKS[self.config.masks]]
        for layer, mask in zip(self.layers, masks, strict=True):
            x = x + layer(x, mask)
        return x
