"""Write and verify the result of finetuning: the source model with new weights."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from ..checkpoint_files.folder import CONFIG, read_folder
from ..convert.check.stock_check import StockCheck
from ..convert.checkpoint.errors import VerificationError
from ..convert.checkpoint.scan import scan
from ..convert.checkpoint.writing import sync_folder, write_file
from ..convert.stock import quiet
from .folders import load, stored_dtype
from .settings import Settings
from .state import load_weights
from .students import merge, prepare

MAX_SHARD = "5GB"


def write_model(settings: Settings, state: Path, folder: Path) -> None:
    """Write the trained model to ``folder`` in the source's dtype, with adapters merged into the weights.

    Its config.json, tokenizer and licence are byte-for-byte copies of the source's.
    """
    source = read_folder(settings.source)
    model = load(settings.source, torch.float32)
    prepare(model, settings)
    load_weights(state, model)
    if settings.lora is not None:
        merge(model)
    model.to(stored_dtype(settings.source))
    with quiet():
        model.save_pretrained(folder, max_shard_size=MAX_SHARD)
    for file in (*source.copied, *(x for x in source.described_by if x.name == CONFIG)):
        write_file(folder, file.name, bytes(file.read()))
    _sync(folder)


def check_model(settings: Settings, folder: Path, advance: Callable[[int], object]) -> dict[str, str]:
    """Read the written model again and return the sha256 of each file.

    ``advance`` is called with the number of bytes after each read.

    Raises:
        VerificationError: a weight is missing, has the wrong shape or is not finite.
    """
    StockCheck(settings.source, logits=False)(folder, {})
    files, nonfinite = scan(read_folder(folder), advance)
    if nonfinite:
        raise VerificationError(
            f"{', '.join(nonfinite)}: expected finite weights, got {nonfinite}; lower --rate"
        )
    return {name: str(file["sha256"]) for name, file in files.items()}


def _sync(folder: Path) -> None:
    """Flush all files in ``folder`` to disk."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
