"""attnlib within other libraries, each of which is imported by its own module alone."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..signatures import kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@kind
def load(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> "PreTrainedModel":
    """The model in a folder of config.json and safetensors, which attends by attnlib's layers; needs transformers.

    It reads what ``python -m attnlib convert --to attnlib`` writes, which no other library does, and any stock folder
    of a family that :func:`attnlib.integrations.transformers.replace` knows. The model is one of transformers, with
    ``generate``, ``save_pretrained`` and all else. No code from the folder runs, and no pickle is opened. ``dtype`` is
    by default that of the config.

    Raises:
        ValueError: a weight is missing or of another shape, or a layer of attnlib's has one too many; or config.json
            is not of its form.
        NotImplementedError: a family, or a field of its config, that attnlib does not know.
        ImportError: transformers is not installed.
    """
    from .transformers import NAME, register, replace
    from .transformers.loading import load_folder
    from .transformers.own import knows_layers

    model = load_folder(Path(folder), dtype=dtype, device=device)
    if not knows_layers(model.config):
        return replace(model)
    register()
    model.set_attn_implementation(NAME)
    return model
