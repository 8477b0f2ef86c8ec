"""Load and validate the two Hugging Face folders of a distillation: the student's and the teacher's."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..checkpoint_files.folder import COPIED, read_folder
from ..convert.check.stock_check import StockCheck
from ..convert.checkpoint.errors import CheckpointError, RequestError
from ..convert.checkpoint.writing import require_writable
from ..convert.stock import load_model, read_config
from ..convert.text.tokens import tokens_of

ATTENTION = ("self_attn", "self_attention", "attention", "attn")  # names of attention in decoder layers
EQUAL_FIELDS = ("num_hidden_layers", "hidden_size", "vocab_size")
COMPARED = 4096  # both tokenizers must agree on this many characters of the text


def require_pair(source: Path, teacher: Path, text: str) -> None:
    """Check that both folders are complete models, with the same sizes and the same tokens for ``text``.

    Raises:
        CheckpointError: a folder is not a complete model that transformers loads, or sizes or tokens differ.
    """
    for folder in (source, teacher):
        read_folder(folder)
        StockCheck(folder, logits=False)
    ours, theirs = (read_config(folder).get_text_config() for folder in (source, teacher))
    for name in EQUAL_FIELDS:
        expected, got = getattr(theirs, name, None), getattr(ours, name, None)
        if expected != got:
            raise CheckpointError(
                f"{name}: expected {expected} as in the teacher {teacher}, got {got} in {source}; "
                "pass the folder that it was converted from"
            )
    start = text[:COMPARED]
    if all(_has_tokenizer(folder) for folder in (source, teacher)):
        count = len(start.encode())
        found = [tokens_of(folder, start, samples=count, length=1) for folder in (source, teacher)]
        if not found[0].equal(found[1]):
            raise CheckpointError(
                f"tokenizer: expected the same tokens as in the teacher {teacher}, got others in {source}; "
                "pass the folder that it was converted from"
            )


def tokenizer_folder(source: Path, teacher: Path) -> Path:
    """Return the one of two model folders that has a tokenizer, or the source if both have one.

    Raises:
        CheckpointError: neither folder has a tokenizer.
    """
    for folder in (source, teacher):
        if _has_tokenizer(folder):
            return folder
    raise CheckpointError(
        f"{source}: expected a tokenizer for the text, got none; copy the model's tokenizer files there"
    )


def require_tokens(tokens: Tensor, folder: Path) -> None:
    """Raise CheckpointError if a token is outside the vocabulary of the folder's model."""
    size = read_config(folder).get_text_config().vocab_size
    if int(tokens.max()) >= size:
        raise CheckpointError(f"tokenizer: expected tokens below vocab_size={size}, got {int(tokens.max())}")


def load(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Load the language model of a folder, on the CPU and with all dropout set to 0.

    No code from the folder runs, and no pickle is opened.

    Raises:
        CheckpointError: the folder is malformed or unsafe, or a weight is missing or not finite.
    """
    checkpoint = read_folder(folder)
    config = read_config(checkpoint)
    text = config.get_text_config()
    for name, value in text.to_dict().items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
            setattr(text, name, 0.0)
    return load_model(checkpoint, config, dtype=dtype)


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """Return the decoder layers of a transformers model, in order.

    Raises:
        CheckpointError: the model has no list of decoder layers with a known attention module.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and any(map(_attention, module)):
            return module
    raise CheckpointError(
        f"{type(model).__name__}: expected {count} decoder layers with one of {ATTENTION} in each, got none; "
        "attention layers cannot be identified"
    )


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Return the attention layers of a transformers model, in order; hybrids have fewer than layers."""
    return [found for layer in decoder_layers(model) if (found := _attention(layer)) is not None]


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype that takes the most bytes among a folder's weights."""
    sizes: dict[torch.dtype, int] = {}
    for stored in read_folder(folder).tensors.values():
        if stored.entry.dtype.is_floating_point:
            sizes[stored.entry.dtype] = sizes.get(stored.entry.dtype, 0) + stored.entry.nbytes
    return max(sizes, key=sizes.__getitem__)


def require_separate(source: Path, teacher: Path, out: Path) -> None:
    """Raise an error unless a result can be created at ``out``, outside both input folders.

    Raises:
        RequestError: ``out`` overlaps an input folder, has no parent folder, or is in use.
        OutputError: the parent folder is read-only.
    """
    place = out.parent.resolve() / out.name
    for name, folder in (("SOURCE", source), ("--teacher", teacher)):
        resolved = folder.resolve()
        if place.is_relative_to(resolved) or resolved.is_relative_to(place):
            raise RequestError(f"OUT: expected a folder separate from {name} {folder}, got {out}")
    if not place.parent.is_dir():
        raise RequestError(f"OUT: expected its parent to be a folder, got {place.parent}; create it")
    require_writable(place.parent, "OUT: expected a writable parent folder")
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise RequestError(
            f"OUT: expected an empty folder or nothing there yet, got {out}; remove it or choose another"
        )


def _attention(layer: nn.Module) -> nn.Module | None:
    return next(
        (getattr(layer, name) for name in ATTENTION if isinstance(getattr(layer, name, None), nn.Module)),
        None,
    )


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in COPIED if "token" in name or "vocab" in name)
