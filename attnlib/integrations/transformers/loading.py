"""Folders of config.json and safetensors as transformers reads them, those of attnlib's own form among them."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ...own_form import INNER, is_own
from .own import config_from, knows_layers, own_class

LOCAL = MappingProxyType({"local_files_only": True, "trust_remote_code": False})


def read_config(folder: Path) -> PreTrainedConfig:
    """The config of a folder; runs no code from there.

    Raises: what transformers raises, and as :func:`config_from`.
    """
    said, _ = PreTrainedConfig.get_config_dict(folder, **LOCAL)
    return config_from(said) if is_own(said) else AutoConfig.from_pretrained(folder, **LOCAL)


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that a config names, one for its kind of language models if it names none; with the layers it knows."""
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if not (isinstance(named, type) and issubclass(named, PreTrainedModel)):
        seeing = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        named = (seeing if type(config) in seeing else transformers.MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    return own_class(named, config) if knows_layers(config) else named


def body_class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The same of the model without a head."""
    kind = transformers.MODEL_MAPPING[type(config)]
    return own_class(kind, config) if knows_layers(config) else kind


def load_folder(folder: Path, *, dtype: torch.dtype | None, device: torch.device | str | None) -> PreTrainedModel:
    """The whole model of a folder, in evaluation mode; None for ``dtype``: as its config says.

    Raises:
        ValueError: a weight is missing or of another shape, or a layer of attnlib has no such weight; names it. Other
            tensors that the model has not are passed over, as transformers does.
    """
    config = read_config(folder)
    options: dict[str, Any] = {"dtype": "auto" if dtype is None else dtype, "use_safetensors": True, **LOCAL}
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = class_of(config).from_pretrained(folder, config=config, **options)
    amiss = {what: sorted(map(str, info[f"{what}_keys"])) for what in ("missing", "mismatched")}
    amiss["unexpected"] = sorted(
        name for name in info["unexpected_keys"] if knows_layers(config) and f".{INNER}" in name
    )
    for what, found in amiss.items():
        if found:
            raise ValueError(f"{folder}: expected the weights of {type(model).__name__}, got {what} {found[0]}")
    return model.to(device)
