"""Views of known tokens with poison everywhere else, and what attention over them should give."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from helpers import Problem, assert_close, assert_lse, eager, make_options
from kernel_helpers import DEVICE
from torch import Tensor

from attnlib import CAUSAL, KVLayout, KVView, Mask, ScoreFunction, cached_attention_with_lse
from attnlib.backends._torch.pages import quantise
from attnlib.backends._triton.decode import operators as cached
from attnlib.backends._triton.decode import tables as decode_tables
from attnlib.backends._triton.launching import layouts
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.backends._triton.launching.launch import plan_cache
from attnlib.backends.operators import flat_over_view
from attnlib.call.call import Call as Attention
from attnlib.call.call import checked
from attnlib.dispatch.storage import new_schedule, update_schedule
from attnlib.scores import Score

NAN = {torch.int8: 0x80, torch.float8_e4m3fn: 0x7F}  # -128, beside a scale of NaN
GARBAGE = torch.tensor([2**31 - 1, -1, -(2**31), 2147480000, -123456, 1 << 20], dtype=torch.int32)
LONG = decode_tables.LONG
SLACK = 3  # packed rows after the last offset


class Sizes(NamedTuple):
    """Tokens of each sequence, how many of them come before its first visible one, tokens of a page (None:
    contiguous), and how tokens lie in a plane."""

    lengths: Sequence[int]
    starts: Sequence[int] = ()
    page_size: int | None = 16
    order: str = "pages"  # or heads, apart

    @property
    def page(self) -> tuple[int, int]:
        """Tokens of a page, and pages in a row of the table; the last ones are nobody's."""
        longest = max((0, *self.lengths))
        return (
            (longest + 5 | 1, 1)
            if self.page_size is None
            else (self.page_size, longest // self.page_size + 3)
        )


@dataclass
class Stored:
    """A view on DEVICE, and the exact keys ``[t, g, d]`` and values ``[t, g, e]`` of each of its
    sequences.
    """

    view: KVView
    starts: Sequence[int]
    tokens: list[tuple[Tensor, Tensor]]

    def call(
        self, counts: int | Sequence[int], heads: int, mask: Mask = CAUSAL, options: Sequence[str] = ()
    ) -> "Call":
        """Random queries, so many for each sequence: dense for an int, and packed, with slack after them."""
        b, layout, view = len(self.tokens), self.view.layout, self.view
        shape = (b, counts)
        if not isinstance(counts, int):
            shape = (sum(counts) + SLACK,)
            offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=DEVICE)
            view = replace(view, cu_seqlens_q=offsets)
        q = torch.randn(*shape, heads, layout.dim + layout.rope_dim).to(layout.dtype)
        return Call(replace(self, view=view), q, counts, mask, make_options(options, b, heads, 1))


@dataclass
class Call:
    """One call, its view on DEVICE and all else on the CPU."""

    stored: Stored
    q: Tensor
    counts: int | Sequence[int]
    mask: Mask = CAUSAL
    options: dict[str, Any] = field(default_factory=dict)

    def solve(self) -> tuple[Tensor, Tensor]:
        """Output and LSE from the kernels, back on the CPU."""
        options = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in self.options.items()}
        given = {"mask": self.mask, "backend": "triton", **options}
        out, lse = cached_attention_with_lse(self.q.to(DEVICE), self.stored.view, **given)
        return out.cpu(), lse.cpu()

    def over(self, **changes: Any) -> "Call":
        """Over a view in which something is different."""
        return replace(self, stored=replace(self.stored, view=replace(self.stored.view, **changes)))

    def scheduled(self) -> "Call":
        """With a schedule such as a cache makes."""
        view, layout = self.stored.view, self.stored.view.layout
        schedule = new_schedule(layout, len(view.lengths) + 3, view.k.device)
        most = self.counts if isinstance(self.counts, int) else max(self.counts)
        limit = view.table.shape[1] * view.page_size
        reach = None if layout.window is None else layout.window + most
        update_schedule(schedule, view.starts, view.lengths, limit=limit, reach=reach)
        return self.over(schedule=schedule)

    def of(self, n: int, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """What belongs to sequence ``n``, as a batch of one."""
        if isinstance(self.counts, int):
            return out[n : n + 1], lse[n : n + 1]
        rows = slice(sum(self.counts[:n]), sum(self.counts[: n + 1]))
        return out[None, rows], lse[None, :, rows]

    def problems(self) -> Iterator[Problem]:
        """The dense problem of each sequence, in fp64."""
        for n, (k, v) in enumerate(self.stored.tokens):
            q, _ = self.of(n, self.q, self.q[..., 0].transpose(-1, -2))
            options = {**self.options, "key_starts": torch.tensor([self.stored.starts[n]])}
            if "alibi_slopes" in options and options["alibi_slopes"].dim() == 2:
                options["alibi_slopes"] = options["alibi_slopes"][n : n + 1]
            yield Problem(q, k[None], v[None], self.mask, options).to(torch.float64)


def store(layout: KVLayout, sizes: Sizes, sigma: float = 1.0) -> Stored:
    """Random tokens; NaN wherever no visible one is, and garbage in the table wherever no page is."""
    (size, columns), b = sizes.page, len(sizes.lengths)
    starts = sizes.starts or [0] * b
    drawn = [
        {
            name: torch.randn(max(0, length - start), heads, width)
            for name, (heads, width, _) in layout.planes.items()
        }
        for start, length in zip(starts, sizes.lengths, strict=True)
    ]
    pages = b * columns + 2
    table = GARBAGE[torch.randint(len(GARBAGE), (b, columns + 1))][:, :columns]  # of wider rows
    free = iter(torch.randperm(pages).tolist())
    planes = {name: _plane(pages, size, plane, sizes.order) for name, plane in layout.planes.items()}
    tokens = []
    for row, start, length, new in zip(table, starts, sizes.lengths, drawn, strict=True):
        for page in range(start // size, -(-length // size)):
            row[page] = next(free)
        at, exact = torch.arange(start, max(start, length)), {}
        where = row[at // size].long(), at % size
        for name, x in new.items():
            if x.shape[-1]:
                stored = _put(planes, name, where, (x * sigma).to(layout.dtype))
                exact[name] = torch.cat((stored.new_zeros(length - len(at), *stored.shape[1:]), stored))
        tokens.append(
            (torch.cat([exact[name] for name in exact if name != "v"], -1), exact.get("v", exact["k"]))
        )
    planes = {name: _moved(plane) for name, plane in planes.items()}
    if layout.is_latent:
        planes |= {"v": planes["k"]} | ({"v_scale": planes["k_scale"]} if layout.storage_dtype else {})
    bounds = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (starts, sizes.lengths)]
    view = KVView(layout, size, **planes, table=_moved(table), starts=bounds[0], lengths=bounds[1])
    return Stored(view, starts, tokens)


def near(view: KVView) -> KVView:
    """A copy on the CPU."""
    tensors = {x.name: getattr(view, x.name) for x in fields(view)}
    copies = {name: x.cpu() for name, x in tensors.items() if isinstance(x, Tensor)}
    same = {"v": copies["k"], "v_scale": copies.get("k_scale")} if view.v is view.k else {}
    return replace(view, **copies | same)


def moved_pages(call: Call) -> Call:
    """The same tokens in other pages."""
    view = call.stored.view
    order = torch.randperm(len(view.k), device=DEVICE)
    table, planes = view.table.clone(), {}
    used = (table >= 0) & (table < len(order))
    table[used] = order.argsort()[table[used].long()].int()
    for name in ("k", "v", "k_rope", "k_scale", "v_scale"):
        if (x := getattr(view, name)) is not None:
            planes[name] = x[order]
    if view.layout.is_latent:
        planes |= {"v": planes["k"], "v_scale": planes.get("k_scale")}
    return call.over(table=table, **planes)


def _plane(pages: int, size: int, plane: tuple[int, int, torch.dtype], order: str) -> Tensor:
    """``[pages, size, heads, width]`` of NaN, in the order of pages or of heads, or with gaps."""
    heads, width, dtype = plane
    shape = (pages, heads, size) if order == "heads" else (pages, size, heads)
    gap = 16 if order == "apart" and width else 0
    x = torch.empty(*shape, *((width + gap,) if width else ()), dtype=dtype)
    x.view(torch.uint8).fill_(NAN[dtype]) if dtype in NAN else x.fill_(torch.nan)
    x = x[..., :width] if width else x
    return x.transpose(1, 2) if order == "heads" else x


def _put(planes: dict[str, Tensor], name: str, where: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """Store ``x``; what is stored, in fp64."""
    plane = planes[name]
    if plane.dtype == x.dtype:
        plane[where] = x
        return x.double()
    x, scale = quantise(x, plane.dtype)
    planes[f"{name}_scale"][where] = scale
    plane.view(torch.uint8)[where] = x.view(torch.uint8)  # torch 2.11 cannot index fp8 on a CPU
    return x.double() * scale.double()[..., None]


def _moved(x: Tensor) -> Tensor:
    """On DEVICE in the same strides, with what lies between."""
    base = x if x._base is None else x._base
    return base.to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())


def assert_right(call: Call) -> None:
    """Our error against fp64 is at most twice that of eager torch at the same dtype, over all sequences
    together; rows of nobody are 0, and -inf."""
    dtype = call.q.dtype
    out, lse = call.solve()
    ours, golden, naive, largest = [], [], ([], []), 1.0
    for n, exact in enumerate(call.problems()):
        mine, mine_lse = call.of(n, out, lse)
        right, right_lse = exact.solve(eager, order=2)
        for order, results in enumerate(naive):
            results.append(exact.to(dtype).solve(eager, order=order)[0].flatten())
        ours.append(mine.flatten())
        golden.append(right.flatten())
        assert_lse(exact.to(dtype), mine_lse, right_lse)
        if mine_lse.numel():
            largest = max(largest, exact.largest_score(), float(right_lse.nan_to_num(0, 0, 0).abs().max()))
    noise = torch.finfo(dtype).eps + 2 * torch.finfo(torch.float32).eps * largest
    assert_close("out", torch.cat(ours), [torch.cat(x) for x in naive], torch.cat(golden), 2, noise)
    if not isinstance(call.counts, int):
        assert not out[sum(call.counts) :].any()
        assert (lse[:, sum(call.counts) :] == -torch.inf).all()


def plan_for(
    patch,
    *,
    tiles: LaunchConfig | None = None,
    processors: int | None = None,
    small: bool = False,
    is_split: bool = True,
) -> None:
    """Other tiles than the tables', a device of so many multiprocessors, ``small`` schedules with short
    splits, and if they are not ``is_split`` no splits of sequences that fill the device without."""
    if tiles is not None:
        patch.setattr(decode_tables, "decode", lambda case: tiles)
    if processors is not None:
        patch.setattr(layouts, "processors", lambda device: processors)
    if small:
        patch.setattr(decode_tables, "GRANULARITY", 16)
        patch.setattr(decode_tables, "FINEST", 16)
        patch.setattr(decode_tables, "SMALLEST", 16)
        patch.setattr(decode_tables, "LARGEST", 32)
        patch.setattr(decode_tables, "HALVINGS", 3)
    patch.setattr(decode_tables, "LONG", LONG if is_split else 0)
    plan_cache.cache_clear()


def kernel(call: Call, score: ScoreFunction | None = None) -> str:
    """The name of the kernel that runs a call, and its rows of queries."""
    asked = checked(
        Attention(call.q.to(DEVICE), call.mask, Score(function=score), kv=call.scheduled().stored.view)
    )
    plan = cached.decode_plan(cached.decode_key(flat_over_view(asked, asked.kv.schedule)))
    return f"{plan.decode.kernel.__name__} {plan.decode.arguments['BLOCK_M']}"
