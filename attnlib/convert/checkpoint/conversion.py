"""A folder of safetensors into another, its attention converted layer by layer, safe against crashes and
strangers.

The source is read four ways and trusted in none: names (folder.py), headers (header.py), config against
weights (model.py), bytes (scan.py). What will come out is planned whole (plan.py) before a byte is written;
files appear whole (writing.py), a stopped run goes on where it was (progress.py), and the target appears with
one rename.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint_files.finite import count_nonfinite
from ...checkpoint_files.folder import CONFIG, INDEX, Checkpoint, buffer_for, read_folder
from ...checkpoint_files.plain_json import dump, parse_object
from ...internal.signatures import kind
from .errors import CheckpointError, DamageError, NoSpaceError, RequestError, VerificationError
from .layer import LayerConverter
from .model import CheckpointModel, read_model
from .plan import ConvertedLayers, Plan, Shard, make_plan
from .progress import WorkFolder, remove_leftovers
from .report import REPORT, make_report, plain_errors
from .scan import scan
from .verify import Check, run_check, verify_shards
from .writing import clean_errors, new_file, only_one, require_room, sigterm_waits, write_file

REFUSALS = (
    ValueError,
    TypeError,
    NotImplementedError,
)  # of weights and requests: the same command meets them again
TOOL = "attnlib checkpoint conversion 5"  # counts up when the same request gives other bytes


@kind
def convert(
    source: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    convert_layer: LayerConverter,
    *,
    settings: Mapping[str, object] | None = None,
    max_shard_size: int = 5 * 10**9,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    keep: bool = True,
    check: Check | None = None,
    progress: bool = True,
) -> dict[str, object]:
    """Convert the attention of the checkpoint in the folder ``source`` into the new folder ``out``; returns
    its report.

    ``source`` may be what ``read_folder`` has read, as with ``follow_links=True`` of a download cache's
    snapshot.

    ``convert_layer`` gets a layer's weights by this library's parameter names, and its shape; it must be a
    pure function, and ``settings`` (plain JSON) must name it and everything else that decides what it
    returns: with equal settings and sources, a stopped conversion goes on behind its last finished shard.
    ``max_shard_size`` is in bytes. ``overwrite`` replaces an earlier result, and nothing else. A run that is
    refused in the middle, with a ValueError, TypeError or NotImplementedError, leaves nothing; ``keep=False``
    also removes what a stopped run finished. ``check`` gets the finished folder before it is in place and the
    errors of its layers, and returns measures for the report or raises VerificationError; the result of a
    failed check is kept, and its report says ``"verified": false``.

    Takes as much memory as two layers and their conversion. Needs a POSIX file system, and huggingface_hub.

    Each error has the ``exit_code`` of a command that ends so.

    Raises:
        RequestError: 2, ``out`` is no place for the result, or another conversion writes there.
        CheckpointError: 3, the source is malformed, unsafe, not finite, of an unknown kind, or changed
        meanwhile. VerificationError: 4, the result is not what it should be. NoSpaceError: 5, no room, or a
        quota used up. OutputError: 1, it cannot be written for another reason.
    """
    read = source if isinstance(source, Checkpoint) else None
    source, target = Path(source if read is None else read.folder).resolve(), Path(os.path.abspath(out))
    if type(max_shard_size) is not int or max_shard_size < 1:
        raise RequestError(f"max_shard_size: expected a positive number of bytes, got {max_shard_size!r}")
    settings = parse_object(dump(settings or {}), "settings")  # as it will be read again
    _require_apart(source, target)
    with clean_errors("nothing was written"), only_one(target), torch.no_grad():
        unfinished = remove_leftovers(target)
        _require_free(target, overwrite)
        model = read_model(read_folder(source) if read is None else read)
        with _bar(model, progress) as bar:
            bar.set_description_str("hashing")
            inputs, nonfinite = scan(model.checkpoint, bar.update)
            if nonfinite and not allow_nonfinite:
                listed = "; ".join(f"{name} {counts}" for name, counts in nonfinite.items())
                raise CheckpointError(f"{listed}: expected finite weights; or pass allow_nonfinite=True")
            layers = ConvertedLayers(model, convert_layer)
            plan = make_plan(layers, max_shard_size)
            request = {
                "tool": TOOL,
                "torch": str(torch.__version__),
                "settings": settings,
                "max_shard_size": max_shard_size,
                "allow_nonfinite": allow_nonfinite,
                "inputs": inputs,
            }
            work = WorkFolder(target, request)
            work.resume(shard.name for shard in plan.shards)
            _require_room(work, plan, model, unfinished)
            with _resumable(work, keep):
                return _write(work, plan, layers, nonfinite, check, bar)


def _write(
    work: WorkFolder, plan: Plan, layers: ConvertedLayers, nonfinite: Mapping, check: Check | None, bar
) -> dict[str, object]:
    """Write what is not there yet, verify all, and put it in place; returns the report."""
    model, finite = layers.model, not work.identity["allow_nonfinite"]
    work.begin()
    bar.total = bar.n + 2 * sum(shard.nbytes for shard in plan.shards)
    bar.set_description_str("writing")
    for shard in plan.shards:
        if shard.name in work.shards:
            bar.update(shard.nbytes)
            continue
        with sigterm_waits():
            work.shards[shard.name] = _write_shard(work.checkpoint, shard, layers, finite, bar.update)
            work.layers |= {str(index): plain_errors(errors) for index, errors in layers.errors.items()}
            work.forms |= {str(index): asdict(form) for index, form in layers.forms.items()}
            work.save()
    plan = plan.with_layers([work.forms[str(index)] for index in model.layers] if work.forms else None)
    outputs = work.shards | _write_rest(work.checkpoint, plan, model, work.identity["inputs"])
    bar.set_description_str("verifying")
    if changed := verify_shards(work.checkpoint, plan, work.shards, bar.update):
        work.forget(changed)
        raise DamageError(
            f"{', '.join(changed)}: expected what was written, got something else; check the disk"
        )
    checked = run_check(check, work.checkpoint, work.layers)
    for file in model.checkpoint.files:
        file.check()
    report = make_report(
        model,
        plan,
        identity=work.identity,
        layers=work.layers,
        nonfinite=nonfinite,
        outputs=outputs,
        checked=checked,
    )
    write_file(work.checkpoint, REPORT, dump(report))
    work.finish()
    if not report["verified"]:
        raise VerificationError(f"{work.target}: kept, and marked as not verified: {report['reason']}")
    return report


def _write_shard(
    folder: Path, shard: Shard, layers: ConvertedLayers, finite: bool, advance: Callable[[int], object]
) -> str:
    """Write one shard, a layer or some megabytes at a time; returns its sha256."""
    buffer = buffer_for(shard.nbytes)
    with new_file(folder, shard.name) as file:
        file.write(shard.header)
        advance(len(shard.header))
        for name, output in shard.outputs.items():
            if output.layer is None:
                stored = layers.model.checkpoint.tensors[name]
                for part in stored.file.chunks(stored.entry.start, stored.entry.nbytes, buffer):
                    file.write(part)
                    advance(len(part))
            else:
                file.write(_checked(layers.planned(name, output), finite, name))
                advance(output.entry.nbytes)
    return file.sha256


def _write_rest(
    folder: Path, plan: Plan, model: CheckpointModel, inputs: Mapping[str, Mapping]
) -> dict[str, str]:
    """Write index, config and what is copied; returns their sha256."""
    texts = {CONFIG: dump(plan.config)} | ({INDEX: dump(plan.index)} if plan.index is not None else {})
    for name, text in texts.items():
        write_file(folder, name, text)
    hashes = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
    for source in model.checkpoint.copied:
        with new_file(folder, source.name) as file:
            file.write(source.read())
        hashes[source.name] = file.sha256
        if file.sha256 != inputs[source.name]["sha256"]:
            raise CheckpointError(f"{source.name}: changed meanwhile; start again when it is at rest")
    return hashes


def _checked(tensor: Tensor, finite: bool, name: str) -> bytearray:
    if finite and (counts := count_nonfinite(tensor)):
        raise VerificationError(f"{name}: expected finite weights of a finite source, got {counts}")
    return bytes_of(tensor)


def bytes_of(tensor: Tensor) -> bytearray:
    """A tensor's elements one behind the other, as files of safetensors have them."""
    data = bytearray(tensor.nbytes)
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(tensor.contiguous().flatten().view(torch.uint8))
    return data


def _require_apart(source: Path, target: Path) -> None:
    """Raises RequestError unless files can be written beside ``target`` that are nowhere in the source."""
    parent = target.parent.resolve()
    place = parent / target.name
    if place.is_relative_to(source) or source.is_relative_to(place):
        raise RequestError(f"out: expected a folder apart from the source {source}, got {target}")
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise RequestError(f"out: expected its parent to be a folder to write in, got {parent}")


def _require_free(target: Path, overwrite: bool) -> None:
    """Raises RequestError unless the result may appear at ``target``."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise RequestError(f"out: expected a folder or nothing there yet, got a link or file {target}")
    if target.exists() and any(target.iterdir()):
        if not overwrite:
            raise RequestError(
                f"out: expected an empty folder or none, got {target} with files; or overwrite=True"
            )
        if not (target / REPORT).is_file():
            raise RequestError(f"out: overwrite=True replaces a folder with a {REPORT}, got {target} without")


def _require_room(work: WorkFolder, plan: Plan, model: CheckpointModel, unfinished: list[Path]) -> None:
    sizes = [shard.nbytes for shard in plan.shards if shard.name not in work.shards]
    sizes += [file.size for file in model.checkpoint.copied + model.checkpoint.described_by]
    try:
        require_room(work.target.parent, sum(sizes), max(sizes), len(sizes) + 4)
    except NoSpaceError as error:
        if others := [str(folder) for folder in unfinished if folder != work.folder]:
            error.add_note(f"unfinished conversions to the same place: {', '.join(others)}")
        raise


@contextmanager
def _resumable(work: WorkFolder, keep: bool) -> Iterator[None]:
    """What is finished stays for the next run of a command that was stopped, and goes with one that was
    refused.
    """
    advice = "what is finished stays: run the same command again to go on"
    try:
        with clean_errors(advice if keep else "what was finished is removed"):
            yield
    except BaseException as error:
        refused = isinstance(error, REFUSALS) and not isinstance(error, DamageError)
        if keep and not refused:
            error.add_note(f"{work.folder}: {advice}")
        else:
            work.abandon()
        raise


def _bar(model: CheckpointModel, progress: bool):
    from tqdm import tqdm  # huggingface_hub needs it too

    total, quick = 3 * sum(file.size for file in model.checkpoint.files), sys.stderr.isatty()
    return tqdm(
        total=total, unit="B", unit_scale=True, disable=not progress, mininterval=0.2 if quick else 15
    )
