"""Train the index branches of a student, and measure their choices by the probability of dense attention."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint_files.folder import Checkpoint
from ..indexing import Chosen
from ..models.own_form import is_own, layers_of
from .distillation import Speaker, differences, text_bits
from .recipe import Recipe

Choose = Callable[..., Chosen]  # the keys of a layer, for the arguments of its call


def chosen_keys(source: Checkpoint) -> int | None:
    """Return how many keys the index branches of a folder choose, at most; None without branches."""
    forms = layers_of(source.config) if is_own(source.config) else ()
    return max((x.select.top * x.select.block_size for x in forms if x.select is not None), default=None)


def branches_of(attention: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the attention layers that have an index branch."""
    return [x for x in attention if getattr(getattr(x, "layer", None), "indexer", None) is not None]


def dense(layer: nn.Module, *args: Any, **kwargs: Any) -> Chosen:
    """Choose all keys."""
    return Chosen(None)


def by_index(layer: nn.Module, *args: Any, **kwargs: Any) -> Chosen:
    """Choose by the index branch of the layer."""
    return layer.choose(*args, **kwargs)


def window(keys: int) -> Choose:
    """Return a choice of ``keys`` by position: a quarter are the first keys, the others the last ones."""
    first = max(1, keys // 4)

    def choose(layer: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Chosen:
        b, s, _ = hidden_states.shape
        queries = torch.arange(s, device=hidden_states.device)[:, None]
        last = queries - torch.arange(keys - first, device=queries.device)
        begin = torch.arange(first, device=queries.device).expand(s, -1)
        last, begin = last.where(last >= first, -1), begin.where(begin <= queries, -1)
        return Chosen(torch.cat((begin, last), 1).int().expand(b, -1, -1)[:, :, None])

    return choose


def losses(
    student: Speaker, teacher: Speaker, tokens: Tensor, recipe: Recipe, step: int
) -> dict[str, Tensor]:
    """Return the losses of a step: in warm-up, index branches alone learn, from dense attention.

    After it, attention sees the chosen keys. The student minimizes its usual loss, and the index loss over
    these keys is added. Each of them has gradients for its own weights only.
    """
    if step < recipe.alone:
        with torch.no_grad(), _visited(student.branches, dense, "index_loss") as found:
            student(tokens[:, :-1])
        index = torch.stack(found).mean()
        return {"loss": index, "index": index}
    with _visited(student.branches, by_index, "index_loss") as found:
        other = differences(student, teacher, tokens)
    index = torch.stack(found).mean()
    loss = other.loss(recipe.progress(step), recipe.objective) + index
    return {"loss": loss, **other._asdict(), "index": index}


def measure(student: Speaker, choose: Choose, keys: int, tokens: Tensor) -> Tensor:
    """Return the cross-entropy in bits, and the mass recall of the chosen keys, of each row: ``[2, b]``.

    The mass recall is the share of the dense attention's probability that falls on the chosen keys. It is the
    mean over layers and over the queries that see more than ``keys`` keys. Dense attention gets the input
    that the layer has in this model. ``tokens`` are ``[b, t + 1]``.
    """
    with _visited(student.branches, choose, "recall") as found:
        bits = text_bits(student(tokens[:, :-1]), tokens).mean(1)
    return torch.stack((bits, torch.stack(found)[:, :, keys:].mean((0, 2))))


@contextmanager
def _visited(layers: Sequence[nn.Module], choose: Choose, method: str) -> Iterator[list[Tensor]]:
    """Make layers attend to what ``choose`` returns, and collect the results of a method of each.

    The method is called after the layer, with the same arguments and the choice as ``selected``. Under FSDP2,
    layers have their weights in ``choose``, and in methods that :meth:`.WorkerGroup.place` registers.
    """
    found: list[Tensor] = []

    def before(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {"selected": choose(layer, *args, **kwargs)}

    def after(layer: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        with torch.enable_grad():
            found.append(getattr(layer, method)(*args, **kwargs))

    hooks = [x.register_forward_pre_hook(before, with_kwargs=True) for x in layers]
    hooks += [x.register_forward_hook(after, with_kwargs=True) for x in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
