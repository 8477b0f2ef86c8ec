"""The command ``python -m attnlib score``: perplexity and KL divergence of a result, by text."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint_files.folder import Checkpoint, read_folder
from ...internal.bars import SHORT, steps
from ..check.by_text import lines_by_text, shown
from ..check.config import require_config
from ..checkpoint.errors import CheckpointError
from ..checkpoint.model import read_model, token_bytes
from ..ending import finished
from ..stock import read_config, stock
from ..targets import device
from .pair import require_pair, scored
from .seen import seen_texts
from .stores import NAMES, Store, weights_dtype
from .texts import ScoredWindows, scored_texts, scored_windows

SAMPLES = 4
EPILOG = """\
exit codes: 0 done; 1 a file cannot be written; 2 wrong request; 3 a checkpoint cannot be scored;
4 the result's logits are not finite; 5 no space left; 130 interrupted. docs/conversion_commands.md has the
reference of all options.

  python -m attnlib score llama-2-7b llama-2-7b-gqa prose.txt code.txt
  python -m attnlib score llama-2-7b llama-2-7b --store int8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``score`` to ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Score a converted or fine-tuned folder against its source: KL divergence and both\n"
        "perplexities for each text, worst first."
    )
    parser.epilog = EPILOG
    parser.add_argument("source", type=Path, metavar="SOURCE", help="checkpoint folder of the original")
    parser.add_argument("result", type=Path, metavar="RESULT", help="folder to score, of any target")
    parser.add_argument(
        "files",
        type=Path,
        nargs="*",
        default=(),
        metavar="FILE",
        help="UTF-8 texts, or folders of them (default: the held-out sources of the bundled sample)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=SAMPLES,
        metavar="N",
        help=f"largest number of windows of each file (default: {SAMPLES})",
    )
    parser.add_argument("--length", type=int, metavar="N", help="tokens per window (default: 512)")
    parser.add_argument(
        "--store",
        choices=NAMES,
        help="score the result with its keys and values read from a cache of this dtype (default: no cache)",
    )
    parser.add_argument(
        "--follow-links", action="store_true", help="follow the links in a snapshot of a download cache"
    )
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    parser.add_argument("--quiet", action="store_true", help="print no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Run ``score`` with parsed arguments, and return the exit code."""

    def score() -> None:
        scores = _score(arguments)
        print(json.dumps(scores, indent=2) if arguments.json else shown_scores(scores))

    return finished("score", score)


def _score(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the scores, and what they are of, as JSON."""
    stock()  # if transformers is missing, fail before the work starts
    source, result = (
        read_folder(folder.resolve(), follow_links=arguments.follow_links)
        for folder in (arguments.source, arguments.result)
    )
    require_config(source)
    require_config(result)
    texts = scored_texts(arguments.files)
    require_pair(source, result, texts[0].calibration)
    windows = scored_windows(source.folder, texts, samples=arguments.samples, length=arguments.length)
    store = None if arguments.store is None else Store.of(arguments.store, weights_dtype(source))
    measures = scored(
        source,
        result,
        windows,
        store=store,
        device=device(),
        follow_links=arguments.follow_links,
        advance=steps(
            None if arguments.quiet else "scoring",
            _steps(source, result, windows, store),
            " steps",
            delay=SHORT,
        ),
    )
    names = ("tokens", "kl_nats", "perplexity_before", "perplexity_after", "by_text")
    return {
        "store": arguments.store,
        "cache_bytes_per_token": _bytes(source, result, store),
        **{name: measures[name] for name in names},
        "seen_by_result": seen_texts(result.folder, texts),
    }


def _steps(source: Checkpoint, result: Checkpoint, windows: ScoredWindows, store: Store | None) -> int:
    """Return the number of steps of the bar: layers, or windows of a model that runs as a whole."""
    layers = [getattr(read_config(x).get_text_config(), "num_hidden_layers", 1) for x in (source, result)]
    return sum(layers) if store is None else layers[0] + len(windows.counts)


def _bytes(source: Checkpoint, result: Checkpoint, store: Store | None) -> dict[str, int] | None:
    """Return the cache bytes per token before and after; None if ``convert`` does not know the source."""
    try:
        model = read_model(source)
        options = {} if store is None else {"dtype": store.dtype, "storage_dtype": store.storage_dtype}
        before, after = source.config, result.config
        return {"before": token_bytes(before, model), "after": token_bytes(after, model, **options)}
    except CheckpointError:
        return None


def shown_scores(scores: Mapping[str, Any]) -> str:
    """Return the scores as lines for the terminal."""
    lines = []
    if (cache := scores["cache_bytes_per_token"]) is not None:
        store = "" if scores["store"] is None else f" in {scores['store']}"
        lines.append(f"cache bytes per token: {cache['before']:,} before, {cache['after']:,} after{store}")
    before, after = (shown(scores[f"perplexity_{when}"]) for when in ("before", "after"))
    lines.append(
        f"KL divergence {scores['kl_nats']:.3g} nats, perplexity {before} before and {after} after, "
        f"on {scores['tokens']:,} tokens"
    )
    lines += lines_by_text(scores)
    if seen := scores["seen_by_result"]:
        lines.append(f"calibrated or trained on: {', '.join(seen)}; other texts may lose more")
    return "\n".join(lines)
