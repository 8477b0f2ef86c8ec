"""attnlib within other libraries, each of which is imported by its own module alone."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..internal.signatures import kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@kind
def load(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    follow_links: bool = True,
    allow_nonfinite: bool = False,
) -> "PreTrainedModel":
    """The model in a folder of config.json and safetensors, which attends by attnlib's layers; needs
    transformers.

    It reads what ``python -m attnlib convert --to attnlib`` writes, which no other library does, and any
    stock folder of a family that :func:`attnlib.integrations.transformers.replace` knows. The model is one of
    transformers, with ``generate``, ``save_pretrained`` and all else. ``folder`` may also be the name of a
    model of the Hub that is in the download cache; nothing is downloaded. ``dtype`` is by default that of the
    config.

    The folder is not trusted: only plain files directly in it are read, as ``convert`` reads them. No code
    from there runs, no pickle is opened, no adapter is looked for, and every size is bounded by what the
    folder holds before memory is taken. A snapshot of a download cache is links to the cache's own ``blobs``:
    these are followed, unless ``follow_links`` is False; any other link is refused. ``allow_nonfinite`` takes
    weights that are NaN or infinite, or become so in ``dtype``.

    Raises:
        CheckpointError: the folder is malformed or unsafe; a weight is missing, of another shape or dtype, or
        not
            finite; there is a layer too many; or config.json is broken or not of its form. It is a
            ValueError.
        TypeError, ValueError: ``dtype`` is no floating dtype, or there is no such ``device``.
        NotImplementedError: a family, or a field of its config, that attnlib does not know.
        ImportError: transformers is not installed.
    """
    from .transformers import NAME, register, replace
    from .transformers.loading import check_arguments, checkpoint_at, load_attnlib

    check_arguments(dtype, device)
    checkpoint = checkpoint_at(folder, follow_links=follow_links)
    options = {"dtype": dtype, "device": device, "allow_nonfinite": allow_nonfinite}
    model = load_attnlib(checkpoint, **options, attend=replace)
    register()
    model.set_attn_implementation(NAME)
    return model
