"""Targets of ``attnlib convert``: validate options against the model and build the layer converter."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType
from typing import get_args

import torch
from torch import Tensor

from .checkpoint.errors import CheckpointError, RequestError, VerificationError
from .checkpoint.layer import ConvertedLayer, LayerConverter, LayerShape
from .checkpoint.model import CheckpointModel, has_key_norms, token_bytes
from .checkpoint.source_rope import rope_of
from .heads.align import Align
from .heads.converter import StoredMerge, grouped, rotates_alike
from .heads.recipe import Grouping, recipe
from .instead import instead
from .latent.deepseek import check_source
from .latent.deepseek import converter as latent_converter
from .latent.norm import Norm, check_biases, check_text
from .own.branches import HEADS, Branches, with_branches
from .own.grouped import GroupedKind
from .own.kind import Kind
from .own.latent import ROPE_DIM, LatentKind
from .own.measuring import head_of
from .own.sizes import (
    allotted,
    alternatives,
    cache_bytes,
    require_loadable,
    require_room,
    smallest,
    with_best_rope,
)
from .text.kept import CalibrationStore
from .wording import option

Made = tuple[LayerConverter, dict[str, object]]
REACH = 2048
BEST_MERGE = (
    "default: mean without a calibration, with --align or for models with output gates; else principal, or "
    "principal-values for models with norms of q and k"
)
BEST_GROUPING = "default: similar for a principal merge, else neighbours"
OPTIONS = MappingProxyType(  # the options that each layer type permits
    {"gqa": ("kv_heads", "merge", "align", "grouping"), "mla": ("rank", "rope_dim", "q_rank", "norm")}
)
SIZES = MappingProxyType({"gqa": ("kv_heads",), "mla": ("rank",), "attnlib": ("kv_heads", "rank", "cache")})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options for the conversion target to ``parser``."""
    kinds = "fewer KV heads (gqa), latent attention (mla), or attnlib's own form for attnlib.load_pretrained"
    parser.add_argument("--to", choices=("gqa", "mla", "attnlib"), required=True, help=kinds)
    heads = parser.add_argument_group("with --to gqa")
    heads.add_argument("--kv-heads", type=int, metavar="N", help="KV heads of each layer (required)")
    heads.add_argument(
        "--merge", choices=get_args(StoredMerge), help=f"how the heads of a group are merged ({BEST_MERGE})"
    )
    heads.add_argument(
        "--align",
        choices=get_args(Align),
        help="which projections to rotate into alignment before merging (default: none)",
    )
    heads.add_argument(
        "--grouping", choices=get_args(Grouping), help=f"how heads are grouped ({BEST_GROUPING})"
    )
    latent = parser.add_argument_group("with --to mla")
    latent.add_argument("--rank", type=int, metavar="N", help="rank of the latent (required)")
    latent.add_argument(
        "--rope-dim", type=int, metavar="N", help=f"number of rotary channels (default: {ROPE_DIM})"
    )
    latent.add_argument(
        "--q-rank",
        type=int,
        metavar="N",
        help="rank of the queries, which llama.cpp requires (default: none)",
    )
    latent.add_argument(
        "--norm",
        choices=get_args(Norm),
        help="how the latent's norm is represented: exact needs biases (default: calibrated if possible)",
    )
    own = parser.add_argument_group("with --to attnlib, which also takes --kv-heads or --rank")
    own.add_argument(
        "--cache",
        metavar="SIZE",
        help="cache bytes per token over all layers, or a share of the source's, such as 25%%",
    )
    own.add_argument(
        "--layers", choices=("gqa", "mla"), help="layer type that shares the cache budget (default: mla)"
    )
    own.add_argument(
        "--select",
        metavar="top=N[,NAME=N]",
        help="add index branches, which finetune trains to choose the N keys of each query; other names are "
        f"heads ({HEADS}), head_dim (that of the layer) and block_size (1). Alone, it copies all weights",
    )
    parser.add_argument(
        "--reach",
        type=int,
        default=REACH,
        metavar="N",
        help=f"largest query-key distance to preserve scores over (default: {REACH})",
    )


def require_own_options(arguments: argparse.Namespace) -> None:
    """Raise RequestError if an option does not apply to the target, or unless exactly one size is given."""
    sizes = SIZES[arguments.to]
    known = {*OPTIONS[_kind(arguments)], *sizes}
    known = known - {"norm"} | {"layers", "select"} if arguments.to == "attnlib" else known
    listed = dict.fromkeys((*OPTIONS["gqa"], *OPTIONS["mla"], *SIZES["attnlib"], "layers", "select"))
    if given := [
        option(name) for name in listed if name not in known and getattr(arguments, name) is not None
    ]:
        raise RequestError(f"{', '.join(given)}: does not apply to --to {arguments.to}; leave it out")
    given = [name for name in sizes if getattr(arguments, name) is not None]
    if not given and arguments.select is None:
        several = (*map(option, sizes), *(["--select"] if arguments.to == "attnlib" else []))
        one = f"one of {', '.join(several)}" if len(several) > 1 else several[0]
        raise RequestError(f"{one}: required with --to {arguments.to}, got none")
    if len(given) > 1:
        raise RequestError(f"{', '.join(map(option, given))}: expected only one of them, got {len(given)}")
    if arguments.layers is not None and arguments.cache is None:
        raise RequestError("--layers: applies only with --cache; leave it out")


def copies(arguments: argparse.Namespace, model: CheckpointModel) -> bool:
    """True if the options ask for all KV heads of the source, so that its weights are copied."""
    return _only_selects(arguments) or arguments.kv_heads == model.shape.kv_heads


def target_of(
    arguments: argparse.Namespace, model: CheckpointModel, *, calibrated: bool
) -> Callable[[CalibrationStore | None], Made]:
    """Return a function that maps calibrations to a layer converter and its options for the report.

    To detect wrong options before any calibration, call the function with None.
    """
    made = {"gqa": _to_gqa, "mla": _to_mla, "attnlib": _to_own}[arguments.to]
    return partial(made, arguments, model, calibrated=calibrated)


def device() -> str:
    """Return the device for calibration and factorization: ``cuda`` if available, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _to_gqa(
    arguments: argparse.Namespace,
    model: CheckpointModel,
    calibrations: CalibrationStore | None,
    *,
    calibrated: bool,
) -> Made:
    options = _recipe(arguments, model, calibrated=calibrated)
    converter = grouped(
        model.config, arguments.kv_heads, calibrations=calibrations, device=device(), **options
    )
    if arguments.kv_heads != model.shape.kv_heads and model.family.kv_heads is None:
        raise RequestError(
            f"--kv-heads: expected {model.shape.kv_heads}, got {arguments.kv_heads}; stock loaders of "
            f"{model.config['model_type']} cannot load fewer KV heads than query heads{instead(model)}"
        )
    return converter, {"kv_heads": arguments.kv_heads} | options


def _recipe(arguments: argparse.Namespace, model: CheckpointModel, *, calibrated: bool) -> dict[str, object]:
    with _refusals(f"--to {arguments.to}"):
        chosen = recipe(
            arguments.merge,
            arguments.align,
            arguments.grouping,
            reach=arguments.reach,
            calibrated=calibrated,
            maps_keys=rotates_alike(model.config) and not has_key_norms(model),
            maps_values=not model.family.is_gated,
        )
    return asdict(chosen)


def _to_mla(
    arguments: argparse.Namespace,
    model: CheckpointModel,
    calibrations: CalibrationStore | None,
    *,
    calibrated: bool,
) -> Made:
    config = model.checkpoint.config
    scaling = rope_of(config).scaling if model.family.rope else None
    try:
        check_source(config)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{instead(model)}") from error
    options = {
        "rope_dim": ROPE_DIM if arguments.rope_dim is None else arguments.rope_dim,
        "q_rank": arguments.q_rank,
        "reach": arguments.reach,
        "norm": _norm(arguments.norm, model, calibrated=calibrated),
    }
    with _refusals("--to mla"):
        made = latent_converter(config, arguments.rank, calibrations=calibrations, device=device(), **options)
    reported = {
        "rank": arguments.rank,
        "rope_scaling": None if scaling is None else type(scaling).__name__.removesuffix("Scaling"),
    }
    return _refusing(made), reported | options


def _norm(asked: Norm | None, model: CheckpointModel, *, calibrated: bool) -> Norm:
    """Return the requested form of the latent norm; the default is ``calibrated`` if possible.

    More programs can load the calibrated form, because it needs no biases. It requires a calibration text,
    and a source model whose biases it can represent.
    """
    if asked == "exact" or not calibrated:
        with _refusals("--to mla"):
            check_text(asked or "exact", calibrated=calibrated)
        return "exact"
    for index, layer in model.layers.items():
        biases = {
            name: model.checkpoint.tensors[layer.prefix + name]
            for name in layer.stored
            if name.endswith("bias")
        }
        try:
            check_biases("calibrated", {name: stored.load() for name, stored in biases.items()})
        except NotImplementedError as error:
            if asked is None:
                return "exact"
            raise RequestError(f"layer {index}: {error}") from error
    return "calibrated"


def _to_own(
    arguments: argparse.Namespace,
    model: CheckpointModel,
    calibrations: CalibrationStore | None,
    *,
    calibrated: bool,
) -> Made:
    if model.family.is_hybrid:
        raise RequestError(
            f"--to attnlib: expected attention in every layer, and {model.config['model_type']} has "
            "recurrent layers; use --to gqa"
        )
    kind = _own_kind(arguments, model, calibrations, calibrated=calibrated)
    size = arguments.kv_heads if arguments.rank is None else arguments.rank
    size = model.shape.kv_heads if copies(arguments, model) else size
    with _refusals("--to attnlib"):
        asked = None if arguments.select is None else Branches.of(arguments.select)
        branches = None if asked is None else asked.forms(model)
        sizes = smallest(kind) if size is None else [size] * len(model.layers)
        try:
            require_loadable(kind, sizes)
        except RequestError as error:
            raise RequestError(f"{error}{instead(model)}") from error
        if size is None:
            total = cache_bytes(arguments.cache, token_bytes(model.checkpoint.config, model))
            indexed = sum(x.head_dim * model.dtype.itemsize for x in branches or () if x is not None)
            total -= indexed
            is_known = calibrations is not None or not calibrated
            kinds = alternatives(kind, total)
            kind = kinds[0]
            require_room(kind, total, indexed)
            if calibrated and calibrations is None:
                head_of(kind)  # raises before the model is calibrated
            if calibrations is not None:
                kind = with_best_rope(kinds, total, calibrations, progress=not arguments.quiet)
            if is_known:
                sizes = allotted(kind, total, calibrations, progress=not arguments.quiet)
    made = kind.converter(sizes)
    reported = {"cache": arguments.cache, "layers": _kind(arguments), "sizes": sizes}
    if branches is not None:
        with _refusals("--select"):
            made = with_branches(made, model, branches)
        reported["select"] = asdict(asked)
    return replace(made, convert_layer=_refusing(made.convert_layer)), reported | dict(kind.options)


def _own_kind(
    arguments: argparse.Namespace,
    model: CheckpointModel,
    calibrations: CalibrationStore | None,
    *,
    calibrated: bool,
) -> Kind:
    if _kind(arguments) == "gqa":
        return GroupedKind(model, calibrations, device(), _recipe(arguments, model, calibrated=calibrated))
    options = {"rope_dim": arguments.rope_dim, "q_rank": arguments.q_rank, "reach": arguments.reach}
    return LatentKind(model, calibrations, device(), options)


def _kind(arguments: argparse.Namespace) -> str:
    """Return the layer type that the options ask for: ``gqa`` or ``mla``."""
    if arguments.to != "attnlib":
        return arguments.to
    if arguments.kv_heads is not None or _only_selects(arguments):
        return "gqa"
    return "mla" if arguments.rank is not None or arguments.layers is None else arguments.layers


def _only_selects(arguments: argparse.Namespace) -> bool:
    """True if the options add index branches and ask for no other change."""
    return arguments.select is not None and all(getattr(arguments, x) is None for x in SIZES["attnlib"])


def _refusing(converter: LayerConverter) -> LayerConverter:
    """Wrap a layer converter to raise its errors as RequestErrors that name the layer."""

    def convert_layer(weights: Mapping[str, Tensor], shape: LayerShape) -> ConvertedLayer:
        with _refusals(f"layer {shape.index}"):
            return converter(weights, shape)

    return convert_layer


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Raise errors of the conversion functions as RequestErrors whose messages start with ``what``."""
    try:
        yield
    except (CheckpointError, RequestError, VerificationError):
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        raise RequestError(f"{what}: {error}") from error
