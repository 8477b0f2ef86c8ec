"""``finetune()``: train a converted folder against the folder it was converted from, and write the result."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..checkpoint_files.folder import read_folder
from ..checkpoint_files.plain_json import dump, parse_object
from ..convert.check.config import require_config
from ..convert.checkpoint.errors import CheckpointError
from ..convert.checkpoint.progress import WorkFolder, remove_leftovers
from ..convert.checkpoint.scan import scan
from ..convert.checkpoint.writing import add_kept, clean_errors, only_one, require_room, write_file
from ..convert.stock import stock
from ..convert.text.freed import give_back
from ..convert.text.tokens import read_text
from ..internal.bars import bar
from . import sparse
from .corpus import Corpus
from .distillation import Speaker
from .folders import (
    attention_layers,
    decoder_layers,
    load,
    require_pair,
    require_separate,
    require_tokens,
    tokenizer_folder,
)
from .log import BOARD, COLUMNS, NAME, SPARSE, Log, board_writer
from .pace import Pace
from .picture import draw, draw_sparse
from .ranks import WorkerGroup, meet
from .result import check_model, write_model
from .settings import Settings
from .state import Curve
from .students import bytes_written, prepare, require_adapters
from .training import TrainingRun, bits_of, held_out_means, train

REPORT, PICTURE, STATE = "finetune_report.json", "recovery.png", "state.safetensors"
TOOL = "attnlib finetune 2"  # increase the number when the same request gives different results
SAVED = "finished steps are saved"


def finetune(settings: Settings) -> dict[str, object]:
    """Distill ``settings.teacher`` into ``settings.source``, write ``settings.out`` and return the report.

    The first rank writes; all ranks return the same report. An interrupted run leaves ``OUT.partial-...``,
    and a run with the same settings resumes from it.

    Raises:
        RequestError: an option is invalid, ``out`` cannot take a result, or the text is too short.
        CheckpointError: a folder is not a complete model, or the two models do not match.
        VerificationError: the loss or the result is not finite.
        OutputError: the result cannot be written.
        ImportError: a package is missing; the message names it.
    """
    settings.check()
    if settings.lora is not None:
        require_adapters()
    if settings.tensorboard:
        board_writer()
    stock()
    require_separate(settings.source, settings.teacher, settings.out)
    for folder in (settings.source, settings.teacher):
        require_config(read_folder(folder))
    settings = replace(settings, keys=sparse.chosen_keys(read_folder(settings.source)))
    settings.check_branches()
    with meet(settings.device) as ranks, clean_errors(), ExitStack() as held:
        settings.check_parts(ranks.size)
        folder = tokenizer_folder(settings.source, settings.teacher)
        corpus = Corpus.read(settings.text, folder, context=settings.context)
        claimed: list[WorkFolder] = []
        path = Path(ranks.on_first(lambda: _claim(settings, corpus, claimed, held)))
        try:
            return _finetune(settings, corpus, path, ranks, claimed[0] if claimed else None)
        except BaseException as error:
            if path.exists() and isinstance(error, ValueError):  # the same command would raise it again
                error.add_note(f"{path}: {SAVED}")
            elif path.exists():
                add_kept(error, path, SAVED)
            raise


def _claim(settings: Settings, corpus: Corpus, claimed: list[WorkFolder], held: ExitStack) -> str:
    """Check the request before weights are loaded, claim the work folder, and return the folder's path."""
    require_pair(settings.source, settings.teacher, read_text(settings.text[0])[0])
    for folder in (settings.source, settings.teacher):  # after vocab_size was compared with the weights
        require_tokens(torch.cat((corpus.train, *corpus.held_out)), folder)
    target = settings.out.absolute()
    held.enter_context(only_one(target))
    remove_leftovers(target)
    inputs = {}
    for name, folder in (("source", settings.source), ("teacher", settings.teacher)):
        checkpoint = read_folder(folder)
        size = sum(file.size for file in checkpoint.files)
        with bar(None if settings.quiet else f"hashing the {name}", size, "B") as shown:
            files, nonfinite = scan(checkpoint, shown.update)
        if nonfinite:
            raise CheckpointError(f"{folder}: expected finite weights, got {nonfinite}")
        inputs[name] = {file: found["sha256"] for file, found in files.items()}
    identity = {
        "tool": TOOL,
        "torch": str(torch.__version__),
        "transformers": stock().__version__,
        "settings": parse_object(dump(settings.identity()), "settings"),
        "text_sha256": corpus.sha256,
        "text_sha256_by_file": list(corpus.sha256_by_file),
        "inputs": inputs,
    }
    work = WorkFolder(target, identity)
    work.resume(())
    work.tidy()
    # A new state is written beside the old one, and the result beside the last one.
    state, result = bytes_written(settings)
    first = 0 if (work.folder / STATE).exists() else state
    require_room(target.parent, first, max(state, result), 16)
    work.begin()
    claimed.append(work)
    return str(work.folder)


def _finetune(
    settings: Settings, corpus: Corpus, folder: Path, ranks: WorkerGroup, work: WorkFolder | None
) -> dict[str, object]:
    windows, pace = corpus.windows(settings.context, limit=settings.scored_windows), Pace()
    shows = ranks.is_first and not settings.quiet

    def scores(speaker: Speaker, name: str, choose: sparse.Choose = sparse.by_index) -> tuple[float, ...]:
        measure = partial(bits_of, speaker)
        if speaker.branches:
            measure = partial(sparse.measure, speaker, choose, settings.keys)
        with bar(f"scoring {name}" if shows else None, len(windows), " windows", stays=False) as shown:
            return held_out_means(measure, windows, settings.recipe, ranks, shown.update)

    original, curve, counted = _learn(settings, corpus, folder, ranks, scores, pace)
    give_back()
    made = folder / "checkpoint"
    with bar("writing the result" if shows else None, 1, " models") as shown:
        ranks.on_first(lambda: _write(settings, folder / STATE, made))
        shown.update()
    found = {"original": original, "before": curve[0][1:]}
    with _speaker(made, settings, ranks, "the result", learns=False) as result:
        found["after"] = scores(result, "the result")
        if result.branches:
            found["window"] = scores(result, "a window of keys", sparse.window(settings.keys))
    measured = {"held_out_tokens": windows[:, 1:].numel(), "run": pace.report(ranks.device, ranks.size)}
    report = ranks.on_first(lambda: _finish(settings, corpus, curve, found, counted | measured, work))
    return parse_object(report.encode(), REPORT)


def _learn(
    settings: Settings,
    corpus: Corpus,
    folder: Path,
    ranks: WorkerGroup,
    scores: Callable[[Speaker, str], tuple[float, ...]],
    pace: Pace,
) -> tuple[tuple[float, ...], Curve, dict[str, object]]:
    """Train or resume; return the teacher's score, the student's curve and the parameter counts."""
    recipe = settings.recipe
    columns = COLUMNS if settings.keys is None else (*COLUMNS, *SPARSE)
    log = Log(folder, board=settings.tensorboard, columns=columns) if ranks.is_first else None
    with (
        nullcontext() if log is None else closing(log),
        _speaker(settings.teacher, settings, ranks, "the original", learns=False) as teacher,
        _speaker(settings.source, settings, ranks, "the converted model", learns=True) as student,
    ):
        teacher.branches = ()  # the original is scored as it is, whatever it chooses
        original = scores(teacher, "the original")
        batches = corpus.batches(
            count=recipe.steps, batch=recipe.batch, context=recipe.context, seed=settings.seed
        )
        run = TrainingRun(folder / STATE, settings.out.name, ranks, log, not settings.quiet, pace)
        curve = train(student, teacher, batches, recipe, lambda: scores(student, "the student"), run)
        return original, curve, _counts(student)


@contextmanager
def _speaker(
    folder: Path, settings: Settings, ranks: WorkerGroup, name: str, *, learns: bool
) -> Iterator[Speaker]:
    """Load a folder's model onto the device, sharded over the ranks; only a student gets gradients.

    A progress bar calls the model ``name``.
    """
    dtype = torch.float32 if learns or not settings.half else torch.bfloat16
    shows = ranks.is_first and not settings.quiet
    with bar(f"loading {name}" if shows else None, 1, " models") as shown:
        model = load(folder, dtype)
        shown.update()
    attention, layers = attention_layers(model), decoder_layers(model)
    model.train(learns)
    if learns:
        torch.manual_seed(settings.seed)
        prepare(model, settings)
        # Recompute activations in the backward for each child of a decoder layer, not for whole layers: hooks
        # on attention are then outside the recomputed code, and ranks gather weights child by child.
        for part in (part for layer in layers for part in layer.children()) if settings.checkpointing else ():
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    else:
        model.requires_grad_(False)
    ranks.place(model, [*attention, *layers])
    branches = sparse.branches_of(attention)
    with Speaker(model, attention, lambda x: model(input_ids=x, use_cache=False).logits, branches) as speaker:
        yield speaker


def _counts(student: Speaker) -> dict[str, object]:
    """Return the entry ``parameters`` of the report."""
    parameters = list(student.model.parameters())
    trained = sum(x.numel() for x in parameters if x.requires_grad)
    return {"parameters": {"trained": trained, "all": sum(x.numel() for x in parameters)}}


def _write(settings: Settings, state: Path, made: Path) -> str:
    write_model(settings, state, made)
    give_back()
    return ""


def _finish(
    settings: Settings,
    corpus: Corpus,
    curve: Curve,
    scores: Mapping[str, tuple[float, ...]],
    counted: Mapping[str, object],
    work: WorkFolder,
) -> str:
    """Write the files beside the weights, move the result into place and return the report as JSON."""
    made = work.checkpoint
    size = sum(path.stat().st_size for path in made.iterdir())
    with bar(None if settings.quiet else "verifying", size, "B") as shown:
        outputs = check_model(settings, made, shown.update)
    per_byte = {name: found[0] / corpus.bytes_per_token for name, found in scores.items()}
    shutil.copyfile(work.folder / NAME, made / NAME)
    if (work.folder / BOARD).exists():
        shutil.copytree(work.folder / BOARD, made / BOARD)
    points = [(steps, bits / corpus.bytes_per_token) for steps, bits, *_ in curve]
    recall = _recall(curve, scores)
    with suppress(ImportError):  # no picture without matplotlib
        _draw(settings, points, per_byte, recall, made / PICTURE)
    report = work.identity | {
        **counted,
        "held_out_bits_per_byte": per_byte,
        "held_out_perplexity": {name: 2 ** found[0] for name, found in scores.items()},
        "curve_bits_per_byte": points,
        **recall,
        "outputs": outputs,
    }
    write_file(made, REPORT, dump(report))
    work.finish()
    return dump(report).decode()


def _draw(
    settings: Settings,
    points: Sequence[tuple[int, float]],
    per_byte: Mapping[str, float],
    recall: Mapping[str, Any],
    path: Path,
) -> None:
    """Draw the curves of the report."""
    name, original = settings.out.name, ("the original", per_byte["original"])
    if not recall:
        draw({name: points}, original, "", "bits per byte", path)
        return
    lines = dict([original, ("a window in place of the choice", per_byte["window"])])
    window, alone = recall["mass_recall"]["window"], settings.recipe.alone
    draw_sparse(name, points, recall["curve_mass_recall"], lines, window, alone, path)


def _recall(curve: Curve, scores: Mapping[str, tuple[float, ...]]) -> dict[str, object]:
    """Return the entries of the report about the mass recall, if there are index branches."""
    if "window" not in scores:
        return {}
    recall = {name: found[1] for name, found in scores.items() if len(found) > 1}
    return {"mass_recall": recall, "curve_mass_recall": [(steps, found) for steps, _, found in curve]}
