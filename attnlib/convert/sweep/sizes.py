"""Choose the sizes that a sweep converts a model to, each as the options of ``convert`` that give it."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .. import command as convert
from ..checkpoint.errors import CheckpointError, RequestError
from ..checkpoint.model import CheckpointModel
from ..instead import instead
from ..own.latent import ROPE_DIM
from ..targets import require_own_options, target_of

MOST = 12  # points of a sweep: sizes times stores
STEP = 16  # the ranks that a sweep chooses are multiples of this, if the cache has that many values
# Shares of the source's cached values, in the order in which a sweep chooses latents of these sizes.
SHARES = ((1, 2), (1, 4), (1, 3), (2, 3), (1, 8))


class Size(NamedTuple):
    """A size of the cache: its name in tables, and the options of ``convert``; the source has none."""

    name: str
    options: tuple[str, ...] = ()


SOURCE = Size("source")


def parsed(size: Size, source: Path, out: Path) -> argparse.Namespace:
    """Return the arguments of ``convert`` that give a size.

    Raises:
        RequestError: the options do not fit together.
    """
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    arguments = parser.parse_args([str(source), str(out), *size.options, "--quiet"])
    require_own_options(arguments)
    return arguments


def chosen_sizes(arguments: argparse.Namespace, model: CheckpointModel, *, stores: int) -> list[Size]:
    """Return the sizes that ``arguments`` ask for, or the default ones; the source is the first.

    Raises:
        RequestError, CheckpointError: a requested size is refused, no size is accepted, or there would be
            more than MOST points.
    """
    calibrated = not arguments.no_calibration
    lists = (
        (arguments.kv_heads, _grouped),
        (arguments.ranks, _latent),
        (arguments.caches, _budget),
    )
    wanted = [forms(value, model, arguments) for values, forms in lists for value in values or ()]
    if wanted:
        sizes = [_accepted(forms, model, calibrated=calibrated) for forms in wanted]
    else:
        found = dict.fromkeys(_default(model, arguments, calibrated=calibrated))
        sizes = [*found][: MOST // stores - 1]
        if not sizes:
            raise RequestError(f"SOURCE: expected a model that a target accepts{instead(model)}")
    sizes = [SOURCE, *dict.fromkeys(size for size in sizes if size != SOURCE)]
    if len(sizes) * stores > MOST:
        raise RequestError(
            f"--stores: expected at most {MOST} points, got {len(sizes) * stores}: {len(sizes)} sizes with "
            f"the source, in {stores} stores; leave some out"
        )
    return sizes


def _grouped(kv_heads: int, model: CheckpointModel, _: argparse.Namespace) -> list[Size]:
    """Return the forms of a size of KV heads, the best one first; the source's own size is the source."""
    if kv_heads == model.shape.kv_heads:
        return [SOURCE]
    to = "attnlib" if model.family.kv_heads is None else "gqa"
    name = f"{kv_heads} KV head{'s' * (kv_heads != 1)}"
    return [Size(name, ("--to", to, "--kv-heads", str(kv_heads)))]


def _latent(rank: int, model: CheckpointModel, arguments: argparse.Namespace) -> list[Size]:
    """Return the forms of latents of a rank; stock loaders read the first one."""
    targets = ("mla", "attnlib") if arguments.latents is None else (arguments.latents,)
    sizes = []
    for to in targets:
        # attnlib's own form chooses the rotary channels that fit the model.
        rope_dim = arguments.rope_dim if to == "attnlib" else _rope_dim(model, arguments)
        given = () if rope_dim in (None, ROPE_DIM) else ("--rope-dim", str(rope_dim))
        sizes.append(Size(f"rank {rank}", ("--to", to, "--rank", str(rank), *given)))
    return sizes


def _budget(cache: str, _: CheckpointModel, arguments: argparse.Namespace) -> list[Size]:
    given = () if arguments.rope_dim is None else ("--rope-dim", str(arguments.rope_dim))
    return [Size(f"cache {cache}", ("--to", "attnlib", "--cache", cache, *given))]


def _accepted(forms: Sequence[Size], model: CheckpointModel, *, calibrated: bool) -> Size:
    """Return the first form that converts ``model``; raise the error of the last one if none does."""
    for size in forms:
        if size == SOURCE:
            return size
        try:
            place = model.checkpoint.folder
            target_of(parsed(size, place, place), model, calibrated=calibrated)(None)
        except (RequestError, CheckpointError):
            if size is forms[-1]:
                raise
        else:
            return size
    raise AssertionError("forms: expected at least one")


def _default(model: CheckpointModel, arguments: argparse.Namespace, *, calibrated: bool) -> Iterator[Size]:
    """Yield sizes that the model accepts, the most useful first: fewer KV heads, and latents of SHARES."""
    heads, width = model.shape.kv_heads, 2 * model.shape.kv_heads * model.shape.head_dim
    fewer = [_grouped(n, model, arguments) for n in range(heads // 2, 0, -1) if heads % n == 0]
    rope_dim, latents = _rope_dim(model, arguments), []
    for over, under in SHARES:
        rank = width * over // under - rope_dim
        rank -= rank % STEP if rank > STEP else 0
        if rank > 0:
            latents.append(_latent(rank, model, arguments))
    for forms in [*fewer[:1], *latents[:2], *fewer[1:2], *latents[2:], *fewer[2:]]:
        try:
            yield _accepted(forms, model, calibrated=calibrated)
        except (RequestError, CheckpointError):
            continue


def _rope_dim(model: CheckpointModel, arguments: argparse.Namespace) -> int:
    """Return the rotary channels of latents: 64, or the largest even divisor of a smaller rotated part."""
    if arguments.rope_dim is not None:
        return arguments.rope_dim
    rotated = model.shape.head_dim
    return next((n for n in range(min(ROPE_DIM, rotated), 1, -1) if n % 2 == 0 and rotated % n == 0), 0)
