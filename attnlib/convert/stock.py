"""Access to the optional transformers package: import it, read configs, load models and silence logs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ..checkpoint_files.folder import CONFIG, Checkpoint, read_folder
from .checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def stock() -> ModuleType:
    """Import the transformers package and return it.

    Raises:
        ImportError: transformers is not installed; the message names the package to install.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "checks and calibration text need transformers: pip install 'attnlib[hf]'"
        ) from error
    return transformers


def read_config(source: Path | Checkpoint) -> "PreTrainedConfig":
    """Read a checkpoint's config with transformers, including checkpoints in attnlib's own format.

    Code in the folder is not run.

    Raises:
        CheckpointError: transformers or attnlib cannot read the config.
    """
    stock()
    from ..integrations.transformers import loading

    with quiet():
        return loading.read_config(checkpoint_of(source))


def checkpoint_of(source: Path | Checkpoint) -> Checkpoint:
    """Return ``source`` as a Checkpoint; for a path, follow links and do not read the weights."""
    return source if isinstance(source, Checkpoint) else read_folder(source, follow_links=True, weights=False)


def class_of(config: "PreTrainedConfig") -> "type[PreTrainedModel]":
    """Import and call :func:`attnlib.integrations.transformers.loading.class_of`."""
    from ..integrations.transformers import loading

    return loading.class_of(config)


def require_buildable(config: "PreTrainedConfig") -> None:
    """Raise CheckpointError unless transformers can build the model of ``config``, here without memory."""
    stock()
    from ..integrations.transformers import loading

    with quiet(), loading.checkpoint_errors("transformers cannot build a model from it"):
        kind = loading.class_of(config)
        with torch.device("meta"):
            kind(config)


def body_class_of(config: "PreTrainedConfig") -> "type[PreTrainedModel]":
    """Import and call :func:`attnlib.integrations.transformers.loading.body_class_of`.

    Raises:
        CheckpointError: the config does not describe a language model.
    """
    from ..integrations.transformers import loading

    try:
        return loading.body_class_of(config)
    except KeyError as error:
        raise CheckpointError(
            f"{CONFIG}: model_type: expected a language model, got {config.model_type}"
        ) from error


def load_model(
    checkpoint: Checkpoint,
    config: "PreTrainedConfig | None" = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    allow_nonfinite: bool = False,
) -> "PreTrainedModel":
    """Load a checkpoint as a transformers model, without transformers' logs and progress bars.

    ``config`` defaults to the checkpoint's own config. See
    :func:`attnlib.integrations.transformers.loading.load_model`.
    """
    stock()
    from ..integrations.transformers import loading

    with quiet():
        config = loading.read_config(checkpoint) if config is None else config
        options = {"dtype": dtype, "device": device, "allow_nonfinite": allow_nonfinite}
        return loading.load_model(checkpoint, config, **options)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs and progress bars of transformers inside the block."""
    logging = stock().utils.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
