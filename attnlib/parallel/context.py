"""Context parallelism: queries, keys and values are sharded by tokens, and so is the output."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..call import Call, Dropout, Origin, Score
from ..mask import AnyMask
from ..running import attend
from .exchange import exchanged
from .sharding import dealt, joined, starts_of, unshard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OPTIONS = ("scale", "softcap", "alibi_slopes", "sinks", "score", "key_starts", "key_ends", "dropout_p", "dropout_seed")


def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: AnyMask, mesh: "DeviceMesh", zigzag: bool = True, **options: Any
) -> Tensor:
    """:func:`attnlib.attention` of a sequence that the ranks of a mesh share; every rank gathers all keys and values.

    q, k and v are this rank's tokens, as :func:`shard` gives them, and so is the output. Best for few KV heads, which
    are little to send. ``options`` are those of :func:`attnlib.attention`, of the whole sequence, the same on every
    rank. A rank's gradients of sinks, slopes and what scores read are of its own queries, which ranks have to add up.

    Raises:
        ValueError, TypeError: as :func:`attnlib.attention` does; or ``dropout_p`` came without a seed.
    """
    _check(q, k, v, zigzag=zigzag)
    call = _call_of(q, k, v, mask, options)
    k, v = (unshard(x, mesh, zigzag=zigzag) for x in (k, v))
    starts = starts_of(mesh.get_local_rank(), mesh.size(), k.shape[1], zigzag=zigzag)
    calls = [_of_queries(call, own, at, k, v) for own, at in zip(q.chunk(len(starts), 1), starts, strict=True)]
    return torch.cat([attend(piece, options.get("backend"))[0] for piece in calls], 1)


def head_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: AnyMask, mesh: "DeviceMesh", zigzag: bool = True, **options: Any
) -> Tensor:
    """:func:`attnlib.attention` of a sequence that the ranks of a mesh share; each computes some heads of all tokens.

    As :func:`gather_attention` otherwise. Ranks exchange tokens for heads before and after it (DeepSpeed-Ulysses;
    Jacobs et al., 2023, 2309.14509), which is less to send than all keys and values where there are many KV heads.

    Raises:
        ValueError, TypeError: as :func:`attnlib.attention` does; the heads cannot be shared out evenly; or
            ``dropout_p`` came without a seed.
    """
    _check(q, k, v, zigzag=zigzag)
    ranks, group = mesh.size(), mesh.get_group()
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] % ranks:
            raise ValueError(
                f"{name}: expected heads that {ranks} ranks can share, got {x.shape[2]}; use gather_attention()"
            )
    call, heads = _call_of(q, k, v, mask, options), q.shape[2] // ranks
    first = mesh.get_local_rank() * heads

    def of_heads(x: Tensor) -> Tensor:
        """From ``[b, tokens here, all heads, d]`` to ``[b, all tokens, heads here, d]``."""
        parts = exchanged(x.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4), group)
        return joined(parts, zigzag=zigzag).transpose(0, 1)

    tensors = {name: x.narrow(-1, first, heads) for name, x in call.score.tensors.items()}
    call = call._replace(score=call.score._replace(**tensors), origin=Origin(head=first))
    out, _ = attend(call._replace(q=of_heads(q), k=of_heads(k), v=of_heads(v)), options.get("backend"))
    parts = exchanged(dealt(out.transpose(0, 1), ranks, zigzag=zigzag), group)
    return parts.permute(2, 1, 0, 3, 4).flatten(2, 3)


def _check(q: Tensor, k: Tensor, v: Tensor, *, zigzag: bool) -> None:
    """Raise ValueError where these are no shards of one sequence."""
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dim() != 4:
            raise ValueError(f"{name}: expected [b, tokens here, heads, d], got {tuple(x.shape)}")
        if x.shape[1] != q.shape[1]:
            raise ValueError(f"{name}: expected {q.shape[1]} tokens here, as q has, got {x.shape[1]}; shard both alike")
    if zigzag and q.shape[1] % 2:
        raise ValueError(f"q: expected two equal chunks of tokens, got {q.shape[1]} tokens; see shard() and zigzag=")


def _call_of(q: Tensor, k: Tensor, v: Tensor, mask: AnyMask, options: Mapping[str, Any]) -> Call:
    """The call of one rank, whose options are those of the whole."""
    unknown = sorted({*options} - {*OPTIONS, "backend"})
    if unknown:
        raise TypeError(f"{unknown[0]}: expected one of {', '.join(OPTIONS)} or backend")
    if options.get("dropout_p") and options.get("dropout_seed") is None:
        raise ValueError(
            "dropout_seed: expected int64 [1], the same on every rank, got None; ranks would draw their own"
        )
    score = Score(**{name: options.get("score" if name == "function" else name) for name in Score._fields})
    dropout = Dropout(options.get("dropout_p", 0.0), options.get("dropout_seed"))
    bounds = {name: options.get(name) for name in ("key_starts", "key_ends")}
    return Call(q, mask, score, k, v, dropout=dropout, **bounds)


def _of_queries(call: Call, q: Tensor, start: int, k: Tensor, v: Tensor) -> Call:
    """The call of queries from index ``start`` on, over those of all keys that they may see."""
    low, high = _seen(call.mask, start, start + q.shape[1], k.shape[1])
    origin = Origin(query=start + q.shape[1] - (high - low), key=low)  # without it, queries are the last of the keys
    return call._replace(q=q, k=k[:, low:high], v=v[:, low:high], origin=origin)


def _seen(mask: AnyMask, start: int, end: int, keys: int) -> tuple[int, int]:
    """The keys ``[low, high)`` outside which the band of a mask hides all from queries ``[start, end)``."""
    band = mask.band
    high = keys if band.right is None else min(keys, max(end + band.right, band.prefix, 0))
    low = 0 if band.left is None else min(max(start - band.left, 0), high)
    return low, high
