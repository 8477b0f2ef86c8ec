"""transformers, which is optional: its package, what it reads of a folder's config.json, and its silence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .checkpoint.errors import CheckpointError
from .checkpoint.folder import CONFIG

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def stock() -> ModuleType:
    """The transformers package.

    Raises:
        ImportError: it is not installed; says what to install.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("checks and text need transformers: pip install 'attnlib[hf]'") from error
    return transformers


def read_config(folder: Path) -> "PreTrainedConfig":
    """The config of a folder as transformers reads it, or of attnlib's own form; runs no code from there.

    Raises:
        CheckpointError: it is refused.
    """
    stock()
    from huggingface_hub.errors import StrictDataclassError

    from ..integrations.transformers import loading

    refusals = (StrictDataclassError, ValueError, LookupError, TypeError, AttributeError, OSError, ArithmeticError)
    try:
        with quiet():
            return loading.read_config(folder)
    except refusals as error:
        raise CheckpointError(f"{CONFIG}: transformers does not read it: {str(error)[:200]}") from error


def class_of(config: "PreTrainedConfig") -> "type[PreTrainedModel]":
    """As :func:`attnlib.integrations.transformers.loading.class_of`."""
    from ..integrations.transformers import loading

    return loading.class_of(config)


def body_class_of(config: "PreTrainedConfig") -> "type[PreTrainedModel]":
    """As :func:`attnlib.integrations.transformers.loading.body_class_of`.

    Raises:
        CheckpointError: there is none.
    """
    from ..integrations.transformers import loading

    try:
        return loading.body_class_of(config)
    except KeyError as error:
        raise CheckpointError(f"{CONFIG}: model_type: expected a language model, got {config.model_type!r}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without the logs and bars of transformers."""
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
