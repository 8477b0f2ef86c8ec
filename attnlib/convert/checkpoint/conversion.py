"""Convert a folder of safetensors into another one, layer by layer, robust against crashes and bad input.

The source is not trusted. Four modules validate it: ``folder.py`` checks file names, ``header.py`` headers,
``model.py`` the config against the weights, and ``scan.py`` the bytes. ``plan.py`` plans the whole result
before a byte is written. Files appear only when complete (``writing.py``), an interrupted run can resume
(``progress.py``), and one rename puts the finished folder in place.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint_files.finite import count_nonfinite
from ...checkpoint_files.folder import CONFIG, INDEX, Checkpoint, buffer_for, read_folder
from ...checkpoint_files.plain_json import dump, parse_object
from ...internal.bars import bar, steps
from ...internal.signatures import kind
from ...models.own_form import plain_form, with_layers
from .errors import CheckpointError, DamageError, NoSpaceError, RequestError, VerificationError
from .layer import LayerConverter
from .model import CheckpointModel, read_model
from .plan import ConvertedLayers, Plan, Shard, make_plan
from .progress import WorkFolder, remove_leftovers
from .report import REPORT, make_report, plain_errors
from .scan import scan
from .verify import Check, run_check, verify_shards
from .writing import (
    add_kept,
    clean_errors,
    new_file,
    only_one,
    require_room,
    require_writable,
    sigterm_waits,
    write_file,
)

AddFiles = Callable[[Mapping[str, Any], Path], object]
# The same command would raise these errors again, so a run that ends with one leaves nothing to resume.
REFUSALS = (ValueError, TypeError, NotImplementedError)
# Increment the number if a change to this code makes equal requests write different bytes.
TOOL = "attnlib checkpoint conversion 7"


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
    """Convert the attention of the checkpoint ``source`` into the new folder ``out`` and return its report.

    ``source`` is a folder or the result of ``read_folder``. For a snapshot in a download cache, call
    ``read_folder`` with ``follow_links=True``.

    ``convert_layer`` gets a layer's shape, and its weights under attnlib's parameter names. It must be a pure
    function. ``settings`` (plain JSON) must name this function and everything else that affects its result:
    with equal settings and sources, an interrupted conversion resumes after its last finished shard.
    ``max_shard_size`` is in bytes. ``overwrite`` replaces an earlier result but no other folder. A run that
    ends with a ValueError, TypeError or NotImplementedError leaves nothing behind; ``keep=False`` also
    removes the finished shards of an interrupted run. ``check`` is called with the finished folder, before
    the move to ``out``, and with the layer errors. It returns measures for the report or raises
    VerificationError. If the check fails, the result is still written, and its report says
    ``"verified": false``.

    Memory use is about two layers plus their conversion. Requires a POSIX file system and huggingface_hub.

    Each error has an ``exit_code`` for commands, which is the number before its cause in this list.

    Raises:
        RequestError: 2, ``out`` cannot hold the result, or another conversion writes there.
        CheckpointError: 3, the source is malformed, unsafe, not finite, of an unknown type, or changed
            during the run.
        VerificationError: 4, the result is wrong.
        NoSpaceError: 5, the disk is full or a quota is exhausted.
        OutputError: 1, the result cannot be written for another reason.
    """
    options = ConversionOptions(
        settings or {}, max_shard_size, allow_nonfinite, overwrite, keep, check, progress=progress
    )
    return convert_with(source, out, convert_layer, options)


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """The options of :func:`convert` by name.

    ``add_files`` is called with the report and the finished folder, to add files such as a picture before the
    folder is moved to its place.
    """

    settings: Mapping[str, object]
    max_shard_size: int
    allow_nonfinite: bool
    overwrite: bool
    keep: bool
    check: Check | None
    add_files: AddFiles | None = None
    progress: bool = True

    def title(self, phase: str) -> str | None:
        """Return the title of a phase's progress bar; None hides the bar."""
        return phase if self.progress else None


def convert_with(
    source: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    convert_layer: LayerConverter,
    options: ConversionOptions,
) -> dict[str, object]:
    """Convert as :func:`convert` does; raises the same errors."""
    read = source if isinstance(source, Checkpoint) else None
    source, target = Path(source if read is None else read.folder).resolve(), Path(os.path.abspath(out))
    if type(options.max_shard_size) is not int or options.max_shard_size < 1:
        raise RequestError(
            f"max_shard_size: expected a positive number of bytes, got {options.max_shard_size!r}"
        )
    settings = parse_object(dump(options.settings), "settings")  # now equal to settings read back from disk
    require_target(source, target, overwrite=options.overwrite)
    with clean_errors("nothing was written"), only_one(target), torch.no_grad():
        unfinished = remove_leftovers(target)
        _require_free(target, options.overwrite)
        model = read_model(read_folder(source) if read is None else read)
        size = sum(file.size for file in model.checkpoint.files)
        with bar(options.title("hashing"), size, "B") as hashing:
            inputs, nonfinite = scan(model.checkpoint, hashing.update)
        if nonfinite and not options.allow_nonfinite:
            listed = "; ".join(f"{name} {counts}" for name, counts in nonfinite.items())
            raise CheckpointError(
                f"{listed}: expected finite weights; pass allow_nonfinite=True to copy them"
            )
        converted = steps(options.title("converting"), len(model.layers), " layers")
        layers = ConvertedLayers(model, convert_layer, converted)
        plan = make_plan(layers, options.max_shard_size)
        request = {"settings": settings, "max_shard_size": options.max_shard_size, "inputs": inputs}
        request |= {"tool": TOOL, "torch": str(torch.__version__), "allow_nonfinite": options.allow_nonfinite}
        work = WorkFolder(target, request)
        work.resume(shard.name for shard in plan.shards)
        work.tidy()  # before free space is counted
        _require_room(work, plan, model, unfinished)
        with _resumable(work, options.keep):
            with bar(options.title("writing"), _bytes(plan), "B") as writing:
                _write_shards(work, plan, layers, writing.update)
            return _finish(work, plan, model, nonfinite, options)


def _write_shards(
    work: WorkFolder, plan: Plan, layers: ConvertedLayers, advance: Callable[[int], object]
) -> None:
    """Write the missing shards, and save the progress after each."""
    finite = not work.identity["allow_nonfinite"]
    work.begin()
    missing = {shard.name for shard in plan.shards} - {*work.shards}
    wanted = {x.layer for shard in plan.shards if shard.name in missing for x in shard.outputs.values()}
    for index in {*layers.model.layers} - wanted:
        layers.skip(index)
    for shard in plan.shards:
        if shard.name in work.shards:
            advance(shard.nbytes)
            continue
        with sigterm_waits():
            work.shards[shard.name] = _write_shard(work.checkpoint, shard, layers, finite, advance)
            work.layers |= {str(index): plain_errors(errors) for index, errors in layers.errors.items()}
            work.forms |= {str(index): plain_form(form) for index, form in layers.forms.items()}
            work.save()


def _finish(
    work: WorkFolder, plan: Plan, model: CheckpointModel, nonfinite: Mapping, options: ConversionOptions
) -> dict[str, object]:
    """Write the other files, verify the whole result, move it into place, and return the report."""
    if work.forms:
        forms = [work.forms[str(index)] for index in model.layers]
        plan = replace(plan, config=with_layers(plan.config, forms))
    outputs = work.shards | _write_rest(work.checkpoint, plan, model, work.identity["inputs"])
    with bar(options.title("verifying"), _bytes(plan), "B") as verifying:
        changed = verify_shards(work.checkpoint, plan, work.shards, verifying.update)
    if changed:
        work.forget(changed)
        raise DamageError(
            f"{', '.join(changed)}: expected the bytes that were written, got others; check the disk"
        )
    checked = run_check(options.check, work.checkpoint, work.layers)
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
    if options.add_files is not None:
        options.add_files(report, work.checkpoint)
    work.finish()
    if not report["verified"]:
        raise VerificationError(f"{work.target}: written, but marked as not verified: {report['reason']}")
    return report


def _write_shard(
    folder: Path, shard: Shard, layers: ConvertedLayers, finite: bool, advance: Callable[[int], object]
) -> str:
    """Write one shard and return its sha256; only one layer or piece of a tensor is in memory at a time."""
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
                file.write(_finite_bytes(layers.planned(name, output), finite, name))
                advance(output.entry.nbytes)
    return file.sha256


def _write_rest(
    folder: Path, plan: Plan, model: CheckpointModel, inputs: Mapping[str, Mapping]
) -> dict[str, str]:
    """Write the index, config.json and the copied files, and return the sha256 of each."""
    texts = {CONFIG: dump(plan.config)} | ({INDEX: dump(plan.index)} if plan.index is not None else {})
    for name, text in texts.items():
        write_file(folder, name, text)
    hashes = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
    for source in model.checkpoint.copied:
        with new_file(folder, source.name) as file:
            file.write(source.read())
        hashes[source.name] = file.sha256
        if file.sha256 != inputs[source.name]["sha256"]:
            raise CheckpointError(
                f"{source.name}: changed during the conversion; start again when nothing writes to it"
            )
    return hashes


def _finite_bytes(tensor: Tensor, finite: bool, name: str) -> bytearray:
    if finite and (counts := count_nonfinite(tensor)):
        raise VerificationError(f"{name}: expected finite weights of a finite source, got {counts}")
    return bytes_of(tensor)


def bytes_of(tensor: Tensor) -> bytearray:
    """Return a tensor's elements as contiguous bytes, as safetensors files store them."""
    data = bytearray(tensor.nbytes)
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(tensor.contiguous().flatten().view(torch.uint8))
    return data


def require_target(source: Path, target: Path, *, overwrite: bool) -> None:
    """Raise an error unless the result of a conversion can be placed at ``target``.

    Raises:
        RequestError: ``target`` overlaps the source, has no parent folder, or is in use.
        OutputError: the parent folder, or a result to replace, is read-only.
    """
    parent = target.parent.resolve()
    place = parent / target.name
    if place.is_relative_to(source) or source.is_relative_to(place):
        raise RequestError(f"out: expected a folder outside the source {source}, got {target}")
    if not parent.is_dir():
        raise RequestError(f"out: expected a writable parent folder, got {parent}; create it")
    require_writable(parent, "out: expected a writable parent folder")
    # convert() removes what a killed run left beside its finished result, before it asks the same.
    if not any(
        path.name.startswith((f"{target.name}.partial-", f"{target.name}.lock")) for path in parent.iterdir()
    ):
        _require_free(target, overwrite)
    if target.exists():
        require_writable(target, "out: expected a result that may be replaced")


def _require_free(target: Path, overwrite: bool) -> None:
    """Raise RequestError unless the result may be placed at ``target``."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise RequestError(f"out: expected a folder or an unused path, got a link or file {target}")
    if target.exists() and any(target.iterdir()):
        if not overwrite:
            raise RequestError(
                f"out: expected an empty or new folder, got {target} with files; use overwrite=True to "
                "replace a result"
            )
        if not (target / REPORT).is_file():
            raise RequestError(
                f"out: overwrite=True replaces only folders with a {REPORT}, got {target} without it"
            )


def _require_room(work: WorkFolder, plan: Plan, model: CheckpointModel, unfinished: list[Path]) -> None:
    sizes = [shard.nbytes for shard in plan.shards if shard.name not in work.shards]
    sizes += [file.size for file in model.checkpoint.copied + model.checkpoint.described_by]
    try:
        require_room(work.target.parent, sum(sizes), max(sizes), len(sizes) + 4)
    except NoSpaceError as error:
        if others := [str(folder) for folder in unfinished if folder != work.folder]:
            error.add_note(f"unfinished conversions to the same target: {', '.join(others)}")
        raise


@contextmanager
def _resumable(work: WorkFolder, keep: bool) -> Iterator[None]:
    """Keep finished shards if the block raises; remove them after one of REFUSALS or without ``keep``."""
    try:
        with clean_errors(None if keep else "finished work is removed"):
            yield
    except BaseException as error:
        refused = isinstance(error, REFUSALS) and not isinstance(error, DamageError)
        if keep and not refused:
            add_kept(error, work.folder, "finished work is kept")
        else:
            work.abandon()
        raise


def _bytes(plan: Plan) -> int:
    return sum(shard.nbytes for shard in plan.shards)
