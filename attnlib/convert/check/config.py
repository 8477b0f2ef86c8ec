"""Check config.json before any work starts, so that its faults are not reported as those of other files."""

from collections.abc import Mapping

import torch

from ...checkpoint_files.folder import CONFIG, Checkpoint
from ..checkpoint.errors import CheckpointError
from ..checkpoint.names import text_of
from ..stock import read_config, require_buildable, stock

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
COUNTS = ("max_position_embeddings", "n_positions", "vocab_size")
DTYPES = ("dtype", "torch_dtype")
REMEDY = "compare it with the original model's"


def require_config(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless transformers can read config.json and build its model.

    transformers looks up some names only when it builds a model, and its error does not name the key. So
    these keys are compared first. The model is built without memory for its weights.
    """
    stock()
    from transformers.activations import ACT2FN

    config = checkpoint.config
    text = text_of(config)
    for key in ACTIVATIONS:
        if isinstance(text.get(key), str) and text[key] not in ACT2FN:
            _refuse(key, "an activation function of transformers, such as silu or gelu", text[key])
    for key in COUNTS:
        if type(text.get(key)) is int and text[key] < 1:
            _refuse(key, "a count of at least 1", text[key])
    for part in (config, text):
        for key in DTYPES:
            if isinstance(part.get(key), str) and not _is_dtype(part[key]):
                _refuse(key, "a dtype of torch, such as bfloat16", part[key])
    if not _are_names(config):
        _refuse("architectures", "a list of names of model classes", config["architectures"])
    require_buildable(read_config(checkpoint))


def _is_dtype(name: str) -> bool:
    return name == "auto" or isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype)


def _are_names(config: Mapping[str, object]) -> bool:
    names = config.get("architectures")
    return names is None or (isinstance(names, list | str) and all(isinstance(name, str) for name in names))


def _refuse(key: str, expected: str, got: object) -> None:
    raise CheckpointError(f"{CONFIG}: {key}: expected {expected}, got {str(got)[:80]}; {REMEDY}")
