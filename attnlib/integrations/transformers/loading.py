"""Checkpoint folders as models of transformers, those of attnlib's own form among them.

``checkpoint_files`` reads the folder. transformers gets a config and tensors in memory, and no path: so
nothing in the folder can have it follow a link, unpickle a file, look for an adapter or ask the Hub.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ...checkpoint_files import Checkpoint, CheckpointError, read_folder
from ...checkpoint_files.config import plain_config
from ...checkpoint_files.folder import CONFIG, GENERATION
from ...checkpoint_files.plain_json import dump, parse_object
from ...checkpoint_files.private import private_folder
from ...models.own_form import base_of, is_own
from .building import family_of
from .families import FAMILIES
from .filling import Filled, require_room
from .own import config_from, knows_layers, own_class

ADAPTER = "adapter_config.json"
# What transformers, torch and the layers raise of fields that are none. ImportError and NotImplementedError
# pass.
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
    """A folder, or the snapshot of a Hub model that is in the download cache already, as :func:`read_folder`
    reads it.

    Raises:
        CheckpointError: there is none, or it is malformed or unsafe.
    """
    place = Path(folder)
    if not place.exists():
        try:
            place = Path(snapshot_download(str(folder), local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            raise CheckpointError(
                f"{folder}: expected a folder with a checkpoint, or a model of the Hub that is in the "
                "download cache, got neither; download it first, as with `hf download`"
            ) from None
    return read_folder(place, follow_links=follow_links)


def read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The config of a folder as transformers reads it, or of attnlib's own form; runs no code from there.

    Raises:
        CheckpointError: it asks for what it must not, see :func:`plain_config`, or is refused.
    """
    said = plain_config(checkpoint)
    with telling("transformers does not read it"):
        if is_own(said):
            return config_from(said)
        with private_folder({CONFIG: dump(said)}) as folder:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that a config names, one for its kind of language models if it names none; with the layers it
    knows.
    """
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if not (isinstance(named, type) and issubclass(named, PreTrainedModel)):
        seeing = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        named = (seeing if type(config) in seeing else transformers.MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    return own_class(named, config) if knows_layers(config) else named


def body_class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The same of the model without a head."""
    kind = transformers.MODEL_MAPPING[type(config)]
    return own_class(kind, config) if knows_layers(config) else kind


def check_arguments(dtype: torch.dtype | None, device: torch.device | str | None) -> None:
    """Refuse what no model can be loaded in or to, before the folder is read.

    Raises:
        TypeError: ``dtype`` is no floating dtype of torch.
        ValueError: there is no such device.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        known = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        remedy = f"; say dtype={known}" if isinstance(known, torch.dtype) else ""
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
    """The model of a folder with the layers of attnlib; ``attend`` puts them in where its config knows none.

    Raises:
        CheckpointError: as :func:`read_config` and :func:`load_model`; or an adapter beside the weights.
        NotImplementedError: a family, or a field of its config, that attnlib does not know.
    """
    if ADAPTER in checkpoint.left_behind:
        raise CheckpointError(
            f"{ADAPTER}: expected a whole model, got one with an adapter beside it; merge the adapter into "
            "the weights with PEFT, or remove the file"
        )
    config = read_config(checkpoint)
    _require_family(config)
    model = load_model(checkpoint, config, dtype=dtype, device=device, allow_nonfinite=allow_nonfinite)
    with telling(f"attnlib makes no layers for {type(model).__name__}"):
        return model if knows_layers(config) else attend(model)


def load_model(
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    allow_nonfinite: bool = False,
) -> PreTrainedModel:
    """The model that ``config`` describes with the weights of a folder, in evaluation mode.

    ``dtype`` is by default as the config says, or else as the weights are. Tensors that the model has not are
    passed over, as transformers does.

    Raises:
        CheckpointError: transformers cannot build it; a weight is missing, of another shape, of no floating
        dtype or
            not finite; a layer of attnlib has no such weight; or there are layers that the config does not
            count.
    """
    with telling("transformers builds no model from it"):
        kind = class_of(config)
        with torch.device("meta"):
            empty = kind(config)
    require_room(empty, checkpoint)
    dtype = dtype or config.dtype or config.get_text_config().dtype or _stored_dtype(checkpoint)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"{CONFIG}: dtype: expected a floating dtype of torch, got {str(dtype)[:80]}")
    filled = Filled(checkpoint, empty)
    placed = (
        device is not None and transformers.utils.is_accelerate_available()
    )  # each tensor when it is read
    with telling(f"transformers does not fit the weights to {kind.__name__}", filled):
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
def telling(problem: str, filled: "Filled | None" = None) -> Iterator[None]:
    """Within it, what a broken config.json makes others raise is a CheckpointError.

    Of errors while tensors were read, which transformers wraps, the first is raised itself.
    """
    try:
        yield
    except (CheckpointError, NotImplementedError):
        raise
    except BROKEN as error:
        if filled is not None and filled.failed:
            raise filled.failed[0] from None
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise CheckpointError(f"{CONFIG}: {problem}: {got}; compare it with the original model's") from error


def _require_family(config: PreTrainedConfig) -> None:
    """Raises NotImplementedError unless a part of the model is of a family that attnlib has layers for."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    if not {getattr(part, "model_type", None) for part in parts} & {kind for kind, _ in FAMILIES}:
        family_of(config.get_text_config(), "self")


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of the first weight, bf16 where that is only for storage."""
    floats = (x.entry.dtype for x in checkpoint.tensors.values() if x.entry.dtype.is_floating_point)
    dtype = next(floats, torch.bfloat16)
    return dtype if dtype.itemsize > 1 else torch.bfloat16


def _generation_config(checkpoint: Checkpoint) -> GenerationConfig:
    """As transformers reads it: in a file of its own, or in an older config.json."""
    file = next((file for file in checkpoint.copied if file.name == GENERATION), None)
    if file is None:
        said = plain_config(checkpoint)
        with telling("transformers does not read how it generates"):
            return GenerationConfig.from_model_config(base_of(said) if is_own(said) else said)
    try:
        with private_folder({GENERATION: dump(parse_object(file.read(), GENERATION))}) as folder:
            return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except BROKEN as error:
        raise CheckpointError(
            f"{GENERATION}: expected one that transformers reads, got {str(error)[:200]}"
        ) from error
