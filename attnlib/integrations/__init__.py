"""Integrations with other libraries; each library is imported only by the module that integrates it."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..internal.signatures import kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@kind
def load_pretrained(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    follow_links: bool = True,
    allow_nonfinite: bool = False,
) -> "PreTrainedModel":
    """Load a folder of config.json and safetensors as a transformers model with attnlib's attention layers.

    The folder may be one that ``python -m attnlib convert --to attnlib`` wrote, which no other library reads,
    or a stock checkpoint of any family that :func:`attnlib.integrations.transformers.replace` supports.
    ``folder`` may also be the name of a Hub model that is already in the local download cache; nothing is
    downloaded. The result is an ordinary transformers model with ``generate``, ``save_pretrained`` and
    everything else. ``dtype`` defaults to the dtype in the config. Needs transformers.

    The folder is not trusted. Only plain files directly inside it are read, as in ``convert``: no code from
    it runs, no pickle is opened, no adapter is applied, and every size is checked against the folder's
    contents before memory is allocated. A snapshot in a download cache consists of links to the cache's own
    ``blobs``; these links are followed unless ``follow_links=False``, and any other link is refused.
    ``allow_nonfinite=True`` accepts weights that are NaN or infinite, or that become so in ``dtype``.

    Raises:
        CheckpointError: the folder is malformed or unsafe; a weight is missing, has the wrong shape or dtype,
            or is not finite; the folder has layers that the config does not; or config.json is invalid. A
            subclass of ValueError.
        TypeError, ValueError: ``dtype`` is not a floating dtype, or ``device`` does not exist.
        NotImplementedError: attnlib does not know the family, or a field of its config.
        ImportError: transformers is not installed.
    """
    from .transformers import NAME, register, replace
    from .transformers.loading import check_arguments, checkpoint_at, load_attnlib

    check_arguments(dtype, device)
    model = load_attnlib(
        checkpoint_at(folder, follow_links=follow_links),
        dtype=dtype,
        device=device,
        allow_nonfinite=allow_nonfinite,
        attend=replace,
    )
    register()
    model.set_attn_implementation(NAME)
    return model
