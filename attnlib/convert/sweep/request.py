"""Turn the arguments of a sweep into its points, and return the table of their scores."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ...checkpoint_files.folder import read_folder
from ..check.budget import windows_for
from ..check.config import require_config
from ..checkpoint.conversion import TOOL, bytes_of
from ..checkpoint.errors import CheckpointError, RequestError
from ..checkpoint.model import CheckpointModel, read_model, token_bytes
from ..checkpoint.writing import clean_errors, only_one, require_writable
from ..picture import Start
from ..score.stores import Store, usual
from ..score.texts import ScoredWindows
from ..stock import stock
from ..targets import device, target_of
from ..text import choice
from ..text.held_out import held_out
from ..text.kept import CalibrationStore, input_hashes
from .finished import FinishedPoints
from .run import Sweep
from .sizes import SOURCE, Size, chosen_sizes, parsed

VERSION = 1  # increment this if the same request gives other scores than before
POINTS = "points"  # the folder of finished points


def sweep(arguments: argparse.Namespace) -> tuple[dict[str, Any], Start]:
    """Run a sweep with parsed arguments; return its table and the facts about the source for a picture.

    Raises:
        RequestError, CheckpointError, VerificationError, OutputError: as a conversion and a score.
    """
    stock()
    chosen = choice.Choice.of(arguments)
    source, out = arguments.source.resolve(), Path(os.path.abspath(arguments.out))
    model = read_model(read_folder(source, follow_links=arguments.follow_links))
    _require_folder(source, out)
    require_config(model.checkpoint)
    names = arguments.stores or (usual(model.dtype), "int8")
    stores = [Store.of(name, model.dtype) for name in dict.fromkeys(names)]
    sizes = chosen_sizes(arguments, model, stores=len(stores))
    settings: dict[str, object] = {"calibration": choice.WEIGHTS_ALONE}
    used, calibrations = None, None
    if chosen is not None:
        windows, settings = chosen.windows(source)
        used = windows.used
        title = None if arguments.quiet else "calibrating"
        place = chosen.place(out, is_left=True)
        calibrations = CalibrationStore(model, windows.tokens, place, device=device(), title=title)
    scored, text = scored_on(arguments.text, model, used)
    identity = _identity(model, settings, scored, quiet=arguments.quiet)
    options = {size: _options(size, model, calibrated=chosen is not None) for size in sizes}
    with clean_errors(), _folder(out), only_one(out / POINTS), calibrations or nullcontext():
        work = Sweep(
            model,
            out,
            sizes,
            stores,
            scored,
            calibrations,
            FinishedPoints(out / POINTS, identity),
            options,
            arguments.follow_links,
            arguments.quiet,
        )
        rows = work.run()
    start = Start.of(model)
    facts = {
        "source": start.name,
        "weights": start.weights,
        "source_bytes_per_token": {x.name: _source_bytes(model, x) for x in stores},
        "text": text,
        "tokens": sum(scored.counts),
    }
    return facts | settings | {"points": rows}, start


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """Create the folder of a sweep, and remove it if the block raises before a point is finished."""
    (out / POINTS).mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in (out / POINTS, out):
            with suppress(OSError):  # it has files
                folder.rmdir()
        raise


def _options(size: Size, model: CheckpointModel, *, calibrated: bool) -> dict[str, object]:
    """Return the options of a size with defaults filled in, as a conversion report has them."""
    if size == SOURCE:
        return {"to": "source"}
    place = model.checkpoint.folder
    arguments = parsed(size, place, place)
    _, options = target_of(arguments, model, calibrated=calibrated)(None)
    return {"to": arguments.to} | options


def _identity(
    model: CheckpointModel, settings: Mapping[str, object], scored: ScoredWindows, *, quiet: bool
) -> dict[str, object]:
    """Return what affects all points: the source, the texts, the device type and the versions."""
    return {
        "version": VERSION,
        "tool": TOOL,
        "torch": str(torch.__version__),
        "transformers": stock().__version__,
        "device": device(),
        "inputs": input_hashes(model.checkpoint, title=None if quiet else "hashing"),
        "scored": {"tokens": sha256(bytes_of(scored.tokens)).hexdigest(), "names": list(scored.names)},
        **settings,
    }


def scored_on(
    files: Sequence[Path] | None, model: CheckpointModel, used: Sequence[int] | None
) -> tuple[ScoredWindows, str]:
    """Return the held-out windows to score on, and a description of their text."""
    texts = () if files is None else choice.read_texts(files)
    count = max(1, windows_for(model.checkpoint, device()))
    folder = model.checkpoint.folder
    held = held_out(folder, texts, used=used if texts else None, windows=count)
    if held is None:
        raise CheckpointError(
            f"{folder}: expected the model's own tokenizer, to score results on a text, got none that fits; "
            "copy it there"
        )
    names = held.names or ((texts[0].name if texts else held.text),) * len(held.tokens)
    return ScoredWindows(held.tokens, (held.tokens.shape[1],) * len(held.tokens), names), held.text


def _source_bytes(model: CheckpointModel, store: Store) -> int:
    return token_bytes(model.checkpoint.config, model, dtype=store.dtype, storage_dtype=store.storage_dtype)


def _require_folder(source: Path, out: Path) -> None:
    """Raise an error unless the files of a sweep can be written to ``out``: a new folder, or a sweep's."""
    place = out.parent.resolve() / out.name
    if place.is_relative_to(source) or source.is_relative_to(place):
        raise RequestError(f"OUT: expected a folder outside the source {source}, got {out}")
    if not out.parent.is_dir():
        raise RequestError(f"OUT: expected a writable parent folder, got {out.parent}; create it")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise RequestError(f"OUT: expected a folder or an unused path, got a link or file {out}")
    if out.exists() and any(out.iterdir()) and not (out / POINTS).is_dir():
        raise RequestError(
            f"OUT: expected a new folder or an earlier sweep, got {out} with other files; name another one"
        )
    require_writable(out if out.exists() else out.parent, "OUT: expected a writable folder")
