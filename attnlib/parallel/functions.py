"""Context-parallel attention as functions of this rank's queries, keys and values."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..call.call import Call, Dropout, Packing
from ..internal.signatures import kind, unknown
from ..masks.band import AnyMask, refuse_mask
from ..scores import Score
from .context_parallel import ContextParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OPTIONS = (
    *("scale", "softcap", "alibi_slopes", "sinks", "score", "key_starts", "key_ends"),
    *("dropout_p", "dropout_seed", "cu_seqlens", "max_seqlen", "backend"),
)


@kind
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AnyMask,
    mesh: "DeviceMesh",
    form: str | None = None,
    zigzag: bool = True,
    **options: Any,
) -> Tensor:
    """Run :func:`attnlib.attention` on a sequence that is sharded over the ranks of a mesh.

    q ``[b, tokens here, h, d]``, k and v hold this rank's tokens, as :func:`shard` returns them, and so does
    the output. ``form`` is ``"ring"``, ``"gather"`` or ``"heads"``. None selects the form with the shortest
    estimated time; :func:`attnlib.explain`, which one rank can call alone, reports it. ``options`` are as in
    :func:`attnlib.attention`. They describe the whole sequence and must be the same on every rank.

    For packed sequences, pass ``cu_seqlens`` int32 ``[b + 1]``, and ``max_seqlen`` if you know it. q, k and v
    are then ``[tokens here, h, d]``: shards of a pack whose sequences begin at these offsets.

    Gradients of sinks, ALiBi slopes and the tensors of score functions only cover this rank's queries or
    heads, so sum them over the ranks.

    Raises:
        ValueError, TypeError: as :func:`attnlib.attention` does; also if the tensors are not shards of one
            sequence, the ranks cannot share the heads, or ``dropout_p`` comes without a seed.
    """
    call = _call_of(q, k, v, mask, options)
    return ContextParallel(mesh, form, zigzag).attend(call, options.get("backend"))


@kind
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: AnyMask, mesh: "DeviceMesh", zigzag: bool = True, **options: Any
) -> Tensor:
    """Run :func:`context_attention` as ring attention (Liu et al., 2023, arXiv 2310.01889).

    Keys and values travel around a ring of ranks while the ranks compute. No rank holds more than two ranks'
    keys and values at once.
    """
    return context_attention(q, k, v, mask=mask, mesh=mesh, form="ring", zigzag=zigzag, **options)


@kind
def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: AnyMask, mesh: "DeviceMesh", zigzag: bool = True, **options: Any
) -> Tensor:
    """Run :func:`context_attention` by gathering all keys and values on every rank; best for few KV heads."""
    return context_attention(q, k, v, mask=mask, mesh=mesh, form="gather", zigzag=zigzag, **options)


@kind
def head_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: AnyMask, mesh: "DeviceMesh", zigzag: bool = True, **options: Any
) -> Tensor:
    """Run :func:`context_attention` so that every rank computes some heads over all tokens.

    This is DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv 2309.14509). With many KV heads, it sends less than
    gathering all keys and values. The number of ranks must divide the numbers of query and KV heads.
    """
    return context_attention(q, k, v, mask=mask, mesh=mesh, form="heads", zigzag=zigzag, **options)


def _call_of(q: Tensor, k: Tensor, v: Tensor, mask: AnyMask, options: dict[str, Any]) -> Call:
    """Return an attention call on this rank's tensors; its options describe the whole sequence."""
    strange = sorted({*options} - {*OPTIONS})
    if strange:
        named = ("q", "k", "v", "mask", "mesh", "form", "zigzag")
        raise TypeError(f"context_attention: {unknown(strange[0], [*named, *OPTIONS])}")
    if options.get("dropout_p") and options.get("dropout_seed") is None:
        raise ValueError(
            "dropout_seed: expected int64 [1], the same on every rank, got None; ranks would draw their own"
        )
    if not isinstance(mask, AnyMask):
        refuse_mask(mask)
    cu_seqlens = options.get("cu_seqlens")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dim() != (4 if cu_seqlens is None else 3):
            dims = (
                "[b, tokens here, heads, d]"
                if cu_seqlens is None
                else "[tokens here, heads, d] with cu_seqlens="
            )
            raise ValueError(f"{name}: expected {dims}, got {tuple(x.shape)}")
    score = Score(**{name: options.get("score" if name == "function" else name) for name in Score._fields})
    packing = None if cu_seqlens is None else Packing(*(cu_seqlens,) * 2, *(options.get("max_seqlen"),) * 2)
    dropout = Dropout(options.get("dropout_p", 0.0), options.get("dropout_seed"))
    bounds = {name: options.get(name) for name in ("key_starts", "key_ends")}
    return Call(q, mask, score, k, v, packing=packing, dropout=dropout, **bounds)
