"""Run a sweep: calibrate once, convert the model to each size, and score it in each store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint_files.folder import read_folder
from ...internal.bars import bar
from ..check.comparison import Outputs
from ..checkpoint.conversion import ConversionOptions, convert_with
from ..checkpoint.model import CheckpointModel, token_bytes
from ..checkpoint.progress import remove
from ..checkpoint.writing import add_kept
from ..score.cached import cached_outputs
from ..score.pair import measured, outputs_before
from ..score.stores import Store
from ..score.texts import ScoredWindows
from ..targets import device, target_of
from ..text.kept import CalibrationStore
from .finished import FinishedPoints
from .sizes import SOURCE, Size, parsed

CONVERTED = "converted"  # the folder of the result that is being scored
SCORES = ("kl_nats", "perplexity_before", "perplexity_after", "by_text")


@dataclass(slots=True)
class Sweep:
    """A sweep of ``model`` into the folder ``out``, with its sizes, stores and texts."""

    model: CheckpointModel
    out: Path
    sizes: Sequence[Size]
    stores: Sequence[Store]
    windows: ScoredWindows
    calibrations: CalibrationStore | None
    finished: FinishedPoints
    options: Mapping[Size, Mapping[str, object]]  # the options of each size, as in a conversion report
    follow_links: bool
    quiet: bool
    before: Outputs | None = None

    def point(self, size: Size, store: Store) -> dict[str, object]:
        """Return the identity of a point among others of the same sweep."""
        return {"options": self.options[size], "store": store.name, "dtype": str(store.dtype)}

    def run(self) -> list[dict[str, Any]]:
        """Score the points that are not finished, and return the scores of all, by size and store.

        If the run stops, finished points stay, and its error says so.
        """
        try:
            self._score_missing()
        except BaseException as error:
            if any(self.finished.folder.iterdir()):
                add_kept(error, self.out, "finished points are kept")
            raise
        finally:
            for path in self.out.glob(f"{CONVERTED}*"):
                remove(path)
        return [self.finished.get(self.point(size, store)) for size in self.sizes for store in self.stores]

    def _score_missing(self) -> None:
        missing = {
            size: some
            for size in self.sizes
            if (some := [x for x in self.stores if self.finished.get(self.point(size, x)) is None])
        }
        if self.calibrations is not None and {*missing} - {SOURCE}:
            self.calibrations(next(iter(self.model.layers)))  # the first call calibrates all layers
        total = len(self.sizes) * len(self.stores)
        done = total - sum(map(len, missing.values()))
        title = None if self.quiet or not missing else "sweeping"
        with bar(title, total, " points", done=done) as shown:
            for size, some in missing.items():
                shown.set_postfix_str(f"converting to {size.name}" if size != SOURCE else "")
                folder = self._converted(size)
                for store in some:
                    shown.set_postfix_str(f"scoring {size.name}, {store.name}")
                    self.finished.put(self.point(size, store), self._scores(folder, size, store))
                    shown.update()
                if size != SOURCE:
                    remove(folder)

    def _converted(self, size: Size) -> Path:
        """Convert the model to a size, and return the result's folder."""
        if size == SOURCE:
            return self.model.checkpoint.folder
        folder = self.out / CONVERTED
        if folder.exists():
            remove(folder)
        arguments = parsed(size, self.model.checkpoint.folder, folder)
        calibrated = self.calibrations is not None
        converter, _ = target_of(arguments, self.model, calibrated=calibrated)(self.calibrations)
        options = ConversionOptions(
            settings={"to": arguments.to, "device": device(), **self.options[size], **self.finished.identity},
            max_shard_size=arguments.max_shard_size,
            allow_nonfinite=False,
            overwrite=True,
            keep=True,
            check=None,
            progress=False,
        )
        convert_with(self.model.checkpoint, folder, converter, options)
        return folder

    def _scores(self, folder: Path, size: Size, store: Store) -> dict[str, Any]:
        """Score the model of a folder in a store."""
        tokens = self.windows.tokens
        if self.before is None:
            self.before = outputs_before(self.model.checkpoint, tokens, device=device(), advance=lambda: None)
        links = self.follow_links and size == SOURCE
        after = cached_outputs(folder, tokens, store, device=device(), follow_links=links)
        measures = measured(self.before, after, self.windows, device=device())
        config = read_folder(folder, follow_links=links, weights=False).config
        size_of = token_bytes(config, self.model, dtype=store.dtype, storage_dtype=store.storage_dtype)
        return {
            "name": size.name,
            "options": " ".join(size.options),
            "store": store.name,
            "cache_bytes_per_token": size_of,
            **{name: measures[name] for name in SCORES},
        }
