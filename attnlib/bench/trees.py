"""Time attention over trees of sequences, beside packed copies of the sequences and FlexAttention."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import CAUSAL, attention, masks, packing, varlen_attention
from .compare import Cells, agreeing, attempt, in_turns
from .place import Target
from .report import Line, Table
from .speed import Rows
from .watchdog import watched

WHATS = ("forward", "backward")


class TreeCase(NamedTuple):
    """Answers of equal length to one prompt, and the heads of the attention call over them."""

    name: str
    prompt: int = 8192
    answer: int = 1024
    answers: int = 8
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def tree(self) -> packing.Tree:
        """Return the tree of the answers, whose tokens all differ but for the prompt's."""
        tokens = torch.arange(self.prompt + self.answers * self.answer)
        prompt, rest = tokens.split((self.prompt, self.answers * self.answer))
        return packing.tree([torch.cat((prompt, answer)) for answer in rest.split(self.answer)])

    def flops(self, what: str, pairs: int) -> float:
        """Return the FLOPs of a pass over this many pairs of a query and a key that it sees."""
        return self.heads * self.dim * pairs * {"forward": 4, "backward": 10}[what]


TREES = (TreeCase("8 answers of 1k to 8k"),)


class Way(NamedTuple):
    """A way to compute a tree: attention of ``leaves`` (q, k, v), and the gradient of its output.

    ``pairs`` is the number of pairs that are visible to it. ``whole`` returns its results as those of the
    tree's rows.
    """

    call: Callable[..., Tensor]
    leaves: list[Tensor]
    dout: Tensor
    pairs: int
    whole: Callable[[list[Tensor]], list[Tensor]] = list

    def results(self) -> list[Tensor]:
        """Return the output and the gradients of q, k and v, for the rows of the tree."""
        out = self.call(*self.leaves)
        grads = torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)
        return self.whole([out.detach(), *grads])

    def action(self, what: str) -> Callable[[], object]:
        """Return the function to time, for "forward" or "backward"."""
        if what == "forward":
            return lambda: self.call(*self.leaves)
        out = self.call(*self.leaves)
        return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)


def rows(place: Target, tables: Sequence[Table], work: Iterable[TreeCase] = TREES) -> Rows:
    """Compare the TFLOP/s per visible pair of a tree, of its sequences as packed copies, and of others."""
    for case in work:
        with watched(f"{tables[0].name}, {case.name}"):
            seconds, pairs = timed(place, case)
        place.tidy()
        for what, taken in seconds.items():
            rates = {
                name: attempt(lambda x, n: case.flops(what, n) / x / 1e12, x, pairs[name])  # noqa: B023
                for name, x in taken.items()
            }
            yield tables[0], Line(f"{case.name}, {what}", rates)


def timed(place: Target, case: TreeCase) -> tuple[dict[str, Cells], dict[str, int]]:
    """Return the seconds of each way and pass, if the ways agree, and the pairs that each way sees."""
    tree = case.tree()
    sizes = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    given = [torch.randn(len(tree.tokens), n, case.dim, device=place.device, dtype=case.dtype) for n in sizes]
    makers = {"ours": whole_tree, "packed copies": copies, "Flex": flex, "Flex FLASH": flash}
    made = {name: attempt(make, place, tree, given) for name, make in makers.items()}
    ways = agreeing(made, Way.results, ("ours", "packed copies"))
    pairs = {name: way.pairs for name, way in ways.items() if isinstance(way, Way)}
    seconds = {}
    for what in WHATS:
        actions = {name: attempt(Way.action, way, what) for name, way in ways.items()}
        seconds[what] = in_turns(actions, place.seconds, place.rounds, place.budget)
    return seconds, pairs | dict.fromkeys(ways.keys() - pairs.keys(), 0)


def whole_tree(place: Target, tree: packing.Tree, given: Sequence[Tensor]) -> Way:
    """Return attnlib's attention over a tree, whose mask is made once, as for the layers of a model."""
    mask, (*leaves, dout) = masks.until(tree.ends[None].to(place.device)), (x[None] for x in given)
    return Way(
        lambda q, k, v: attention(q, k, v, mask=mask, backend=place.backend),
        [x.clone().requires_grad_() for x in leaves],
        dout,
        int((tree.positions + 1).sum()),
    )


def copies(place: Target, tree: packing.Tree, given: Sequence[Tensor]) -> Way:
    """Return attnlib's packed causal attention over the sequences, each with a copy of what they share."""
    at = torch.cat(tree.rows).to(place.device)
    lengths = [len(x) for x in tree.rows]
    offsets = torch.tensor([0, *lengths], device=place.device).cumsum(0, dtype=torch.int32)
    rows = torch.arange(len(at), device=place.device)
    # A row that sequences share has its output, and the gradient of it, in the first of its copies.
    first = torch.full((len(tree.tokens),), len(at), device=place.device).scatter_reduce(0, at, rows, "amin")
    *leaves, dout = given
    alone = torch.zeros(len(at), *dout.shape[1:], device=place.device, dtype=dout.dtype)
    alone[first] = dout
    longest = max(lengths)
    options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "backend": place.backend}
    options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def whole(results: list[Tensor]) -> list[Tensor]:
        out, *grads = results
        summed = [x.new_zeros(len(first), *x.shape[1:]).float().index_add(0, at, x.float()) for x in grads]
        return [x[None] for x in (out[first], *summed)]

    return Way(
        lambda q, k, v: varlen_attention(q, k, v, mask=CAUSAL, **options),
        [x[at].requires_grad_() for x in leaves],
        alone,
        sum(n * (n + 1) // 2 for n in lengths),
        whole,
    )


def flex(place: Target, tree: packing.Tree, given: Sequence[Tensor], **options: object) -> Way:
    """Return FlexAttention with the same mask, whose blocks are found once."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ends, t = tree.ends.to(place.device), len(tree.tokens)
    size = {"BLOCK_SIZE": (128, 128)} if options else {}
    blocks = create_block_mask(
        lambda b, h, i, j: (j <= i) & (i < ends[j]), None, None, t, t, device=place.device, **size
    )
    attend = torch.compile(flex_attention, dynamic=False)
    *leaves, dout = (x[None].transpose(1, 2).contiguous() for x in given)
    return Way(
        lambda q, k, v: attend(q, k, v, block_mask=blocks, enable_gqa=True, kernel_options=options or None),
        [x.requires_grad_() for x in leaves],
        dout,
        int((tree.positions + 1).sum()),
        lambda results: [x.transpose(1, 2) for x in results],
    )


def flash(place: Target, tree: packing.Tree, given: Sequence[Tensor]) -> Way:
    """Return FlexAttention on FlashAttention-4's kernels."""
    return flex(place, tree, given, BACKEND="FLASH")
