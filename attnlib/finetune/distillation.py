"""What a student has to learn from its teacher: the next token, and what each attention layer adds to the
stream.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

Objective = Literal["teacher", "text"]
ATTENTION = 1.0  # what a relative error of 1 weighs, in bits
SILENT = 1e-12  # the least that a sequence's outputs count as, squared and summed


class Speaker:
    """A language model as distillation sees it: ``logits(tokens)``, and attention layers that can be heard.

    ``model`` has the parameters; ``attention`` are its attention layers in order, whose first output is ``[b,
    t, m]``. Hooks are on them inside a ``with`` block alone.
    """

    def __init__(self, model: nn.Module, attention: Sequence[nn.Module], logits: Callable[[Tensor], Tensor]):
        self.model: nn.Module = model
        self._attention, self._logits = attention, logits
        self._heard: dict[int, Tensor] | None = None  # while somebody listens
        self._given: Sequence[Tensor] | None = None
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for index, layer in enumerate(self._attention):
            self._hooks += [
                layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True),
                layer.register_forward_hook(partial(self._leave_layer, index)),
            ]
        return self

    def __exit__(self, *raised: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits ``[b, t, vocabulary]`` after each of ``tokens`` ``[b, t]``."""
        return self._logits(tokens)

    def listen(self, tokens: Tensor, given: Sequence[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """Logits, and what each attention layer gives out, ``[b, t, m]``.

        With ``given``, that goes on in place of what the layers give out, and no gradient goes through a
        layer to those before it: each layer then reads what the teacher's reads, and learns alone.
        """
        self._given, self._heard = given, {}
        try:
            logits = self._logits(tokens)
            return logits, [self._heard[index] for index in range(len(self._attention))]
        finally:
            self._given = self._heard = None

    def _enter_layer(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self._given is None:
            return None
        kwargs = {name: _detached(value) for name, value in kwargs.items()}
        return tuple(_detached(value) for value in args), kwargs

    def _leave_layer(self, index: int, layer: nn.Module, args: tuple, output):
        y = output[0] if isinstance(output, tuple) else output
        if self._heard is not None:
            self._heard[index] = y
        if self._given is None:
            return None
        taught = self._given[index].to(y.dtype)
        return (taught, *output[1:]) if isinstance(output, tuple) else taught


class Differences(NamedTuple):
    """Scalars: KL of the teacher's next tokens from the student's and the text's cross-entropy, in bits per
    token; and ``|y - y'|^2 / |y|^2`` of what an attention layer gives out, on the mean over layers and
    sequences."""

    kl: Tensor
    attention: Tensor
    text: Tensor

    def loss(self, progress: float, objective: Objective) -> Tensor:
        """What training makes smaller, ``progress`` from 0 to 1 through it.

        What attention layers give out fades: in the end only what the model says counts. With ``"teacher"``
        that is the KL, for teachers that have read more than the text. With ``"text"`` the student learns the
        text, and the whole teacher fades (Clark et al., 2019, arXiv 1907.04829), whom a student that learns
        from the text soon outgrows. Of a GQA model whose teacher still learns: after 300 steps 2.249 bits a
        byte without the text, 2.223 with it; after 500, 2.168 with a teacher that stays, 2.164 with one that
        fades (tiny preset of examples/finetune_gqa.py).
        """
        fading = (1 - progress) * ATTENTION * self.attention
        return self.kl + fading if objective == "teacher" else self.text + (1 - progress) * self.kl + fading


def differences(student: Speaker, teacher: Speaker, tokens: Tensor) -> Differences:
    """How a student differs from its teacher on ``tokens`` ``[b, t + 1]``; gradients reach the student alone.

    Every layer of the student reads its own stream, so that a later one can make up for what an earlier one
    lost.
    """
    tokens, following = tokens[:, :-1], tokens[:, 1:].flatten()
    with torch.no_grad():
        expected, taught = teacher.listen(tokens)
    logits, learnt = student.listen(tokens)
    logits, expected = (x.float().flatten(0, 1).log_softmax(-1) for x in (logits, expected))
    return Differences(
        F.kl_div(logits, expected, log_target=True, reduction="batchmean") / math.log(2),
        _relative_error(taught, learnt),
        F.nll_loss(logits, following) / math.log(2),
    )


def layerwise(student: Speaker, teacher: Speaker, tokens: Tensor) -> Tensor:
    """The ``attention`` of Differences where every layer of the student reads what the teacher's reads.

    No layer's error depends on another's weights, so that all of them learn at once, from one pass of the
    teacher: the student's own is given the teacher's outputs. ``tokens`` are ``[b, t + 1]``, as there.
    """
    with torch.no_grad():
        _, taught = teacher.listen(tokens[:, :-1])
    _, learnt = student.listen(tokens[:, :-1], given=taught)
    return _relative_error(taught, learnt)


def text_bits(logits: Tensor, tokens: Tensor) -> Tensor:
    """Bits ``[b, t]`` of saying each of ``tokens`` ``[b, t + 1]`` but the first, by logits after those before
    it.
    """
    nats = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return nats.view(len(tokens), -1) / math.log(2)


def _relative_error(taught: Sequence[Tensor], learnt: Sequence[Tensor]) -> Tensor:
    """Of each sequence by itself, so that the mean over parts of a batch is that over all of it."""
    errors = []
    for expected, got in zip(taught, learnt, strict=True):
        expected, got = expected.float().flatten(1), got.float().flatten(1)
        size = expected.square().sum(1).clamp_min(SILENT)
        errors.append(((expected - got).square().sum(1) / size).mean())
    return torch.stack(errors).mean()


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, Tensor) else value
