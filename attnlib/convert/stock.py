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
    """The config of a folder as transformers reads it; runs no code from there.

    Raises:
        CheckpointError: transformers refuses it.
    """
    configs = stock().AutoConfig
    from huggingface_hub.errors import StrictDataclassError

    refusals = (StrictDataclassError, ValueError, LookupError, TypeError, AttributeError, OSError, ArithmeticError)
    try:
        with quiet():
            return configs.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except refusals as error:
        raise CheckpointError(f"{CONFIG}: transformers does not read it: {str(error)[:200]}") from error


def class_of(config: "PreTrainedConfig") -> "type[PreTrainedModel]":
    """The class of transformers that a config names; one for its kind of language models if it names none."""
    transformers = stock()
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named
    seeing = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return (seeing if type(config) in seeing else transformers.MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]


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
