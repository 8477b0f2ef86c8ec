"""Load checkpoint folders as transformers models, including folders in attnlib's own form.

The module ``checkpoint_files`` reads the folder. transformers gets a config and tensors in memory, but not
the folder's path. No folder can therefore make transformers follow a link, unpickle a file, look for an
adapter or contact the Hub.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
    StrictDataclassFieldValidationError,
)
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ...checkpoint_files import Checkpoint, CheckpointError, read_folder
from ...checkpoint_files.config import plain_config
from ...checkpoint_files.folder import CONFIG, GENERATION
from ...checkpoint_files.plain_json import dump, parse_object
from ...checkpoint_files.private import private_folder
from ...models.own_form import base_of, is_own
from .building import family_of
from .families import FAMILIES
from .filling import Filled, require_size
from .own import config_from, knows_layers, own_class

ADAPTER = "adapter_config.json"
# transformers, torch and the layers raise these errors for invalid config fields. They are converted to
# CheckpointError; ImportError and NotImplementedError are not.
BROKEN = (
    StrictDataclassError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    OSError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)


def checkpoint_at(folder: str | Path, *, follow_links: bool = True) -> Checkpoint:
    """Read a checkpoint folder, or a Hub model in the local download cache, with :func:`read_folder`.

    Raises:
        CheckpointError: the folder does not exist, or is malformed or unsafe.
    """
    path = Path(folder)
    if not path.exists():
        try:
            path = Path(snapshot_download(str(folder), local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            raise CheckpointError(
                f"{folder}: expected a folder with a checkpoint, or a Hub model in the download cache, got "
                "neither; download it first, for example with `hf download`"
            ) from None
    return read_folder(path, follow_links=follow_links)


def read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the config of a folder, stock or in attnlib's own form; no code from the folder runs.

    Raises:
        CheckpointError: the config requests something forbidden, see :func:`plain_config`, or transformers
            rejects it.
    """
    fields = plain_config(checkpoint)
    with checkpoint_errors("transformers cannot read it"):
        if is_own(fields):
            return config_from(fields)
        with private_folder({CONFIG: dump(fields)}) as folder:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the model class that a config names, or the language model class for configs of its type.

    If the config describes attention layers of attnlib, a model of this class has these layers.
    """
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if not (isinstance(named, type) and issubclass(named, PreTrainedModel)):
        seeing = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        named = (seeing if type(config) in seeing else transformers.MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    return own_class(named, config) if knows_layers(config) else named


def body_class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a config's model without its language model head.

    If the config describes attention layers of attnlib, a model of this class has these layers.
    """
    kind = transformers.MODEL_MAPPING[type(config)]
    return own_class(kind, config) if knows_layers(config) else kind


def check_arguments(dtype: torch.dtype | None, device: torch.device | str | None) -> None:
    """Validate ``dtype`` and ``device`` before the folder is read.

    Raises:
        TypeError: ``dtype`` is not a floating dtype of torch.
        ValueError: ``device`` does not exist.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        known = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        remedy = f"; pass dtype={known}" if isinstance(known, torch.dtype) else ""
        raise TypeError(f"dtype: expected a floating dtype such as torch.bfloat16, got {dtype!r}{remedy}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        why = str(error).partition("\n")[0][:200]
        raise ValueError(f"device: expected one that torch has here, got {device!r}: {why}") from error


def load_attnlib(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    allow_nonfinite: bool,
    attend: Callable[[PreTrainedModel], PreTrainedModel],
) -> PreTrainedModel:
    """Load a folder as a model with attnlib layers; ``attend`` adds them unless the config describes its own.

    Raises:
        CheckpointError: see :func:`read_config` and :func:`load_model`; or an adapter lies beside the
            weights.
        NotImplementedError: attnlib does not know the family, or a field of its config.
    """
    if ADAPTER in checkpoint.left_behind:
        raise CheckpointError(
            f"{ADAPTER}: expected a complete model, got one with a separate adapter; merge the adapter into "
            "the weights with PEFT, or remove the file"
        )
    config = read_config(checkpoint)
    _require_family(config)
    model = load_model(checkpoint, config, dtype=dtype, device=device, allow_nonfinite=allow_nonfinite)
    with checkpoint_errors(f"attnlib cannot make layers for {type(model).__name__}"):
        return model if knows_layers(config) else attend(model)


def load_model(
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    allow_nonfinite: bool = False,
) -> PreTrainedModel:
    """Build the model that ``config`` describes with the weights of a folder, in evaluation mode.

    ``dtype`` defaults to the dtype in the config, and else to the dtype of the weights. Tensors that the
    model does not have are ignored, as in transformers.

    Raises:
        CheckpointError: transformers cannot build the model; a weight is missing, has the wrong shape or no
            floating dtype, or is not finite; the folder has a weight that its attnlib layer lacks; or the
            folder has more layers than the config.
    """
    with checkpoint_errors("transformers cannot build a model from it"):
        kind = class_of(config)
        with torch.device("meta"):
            empty = kind(config)
    require_size(empty, checkpoint)
    dtype = dtype or config.dtype or config.get_text_config().dtype or _stored_dtype(checkpoint)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"{CONFIG}: dtype: expected a floating dtype of torch, got {str(dtype)[:80]}")
    filled = Filled(checkpoint, empty)
    # with accelerate, each tensor goes to the device as soon as it is read
    placed = device is not None and transformers.utils.is_accelerate_available()
    with checkpoint_errors(f"transformers cannot load the weights into {kind.__name__}", filled):
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=filled.slices,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **({"device_map": {"": torch.device(device)}} if placed else {}),
        )
    filled.check(model, info, own=knows_layers(config), allow_nonfinite=allow_nonfinite)
    if model.can_generate():
        model.generation_config = _generation_config(checkpoint)
    model.name_or_path = model.config.name_or_path = str(checkpoint.folder)
    return model.to(device)


@contextmanager
def checkpoint_errors(problem: str, filled: "Filled | None" = None) -> Iterator[None]:
    """Convert errors that a broken config.json causes in transformers or torch to a CheckpointError.

    If a tensor cannot be read, transformers wraps the error; the original error is raised instead.
    """
    try:
        yield
    except (CheckpointError, NotImplementedError):
        raise
    except StrictDataclassFieldValidationError as error:
        raise CheckpointError(
            f"{CONFIG}: {_wrong_field(error)}; compare it with the original model's"
        ) from error
    except BROKEN as error:
        if filled is not None and filled.failed:
            raise filled.failed[0] from None
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise CheckpointError(f"{CONFIG}: {problem}: {got}; compare it with the original model's") from error


def _wrong_field(error: StrictDataclassFieldValidationError) -> str:
    """Return ``field: expected types, got value`` from huggingface_hub's longer message about a field."""
    message = " ".join(str(error).split())
    field, reason = re.search(r"field '(\w+)': (.*)", message).groups()
    found = re.search(r"got (\w+) \(value: (.*?)\)(;|$)", reason)
    expected = dict.fromkeys(re.findall(r"expected (\w+), got", reason))
    if found is None or not expected:
        return f"{field}: {reason[:300]}"
    types = " or ".join("null" if name == "NoneType" else name for name in expected)
    got = "null" if found[1] == "NoneType" else f"{found[1]} {found[2].strip(chr(39))[:80]}"
    return f"{field}: expected {types}, got {got}"


def _require_family(config: PreTrainedConfig) -> None:
    """Raise NotImplementedError unless attnlib supports the family of at least one part of the model."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    if not {getattr(part, "model_type", None) for part in parts} & {kind for kind, _ in FAMILIES}:
        family_of(config.get_text_config(), "self")


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of the first floating weight, or bf16 if that dtype has only one byte."""
    floats = (x.entry.dtype for x in checkpoint.tensors.values() if x.entry.dtype.is_floating_point)
    dtype = next(floats, torch.bfloat16)
    return dtype if dtype.itemsize > 1 else torch.bfloat16


def _generation_config(checkpoint: Checkpoint) -> GenerationConfig:
    """Return the generation config, from its own file or from an older config.json."""
    file = next((file for file in checkpoint.copied if file.name == GENERATION), None)
    if file is None:
        fields = plain_config(checkpoint)
        with checkpoint_errors("transformers cannot read its generation settings"):
            return GenerationConfig.from_model_config(base_of(fields) if is_own(fields) else fields)
    try:
        with private_folder({GENERATION: dump(parse_object(file.read(), GENERATION))}) as folder:
            return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except BROKEN as error:
        raise CheckpointError(
            f"{GENERATION}: expected a file that transformers can read, got {str(error)[:200]}"
        ) from error
