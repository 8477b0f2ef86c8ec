"""Distillation losses: the student matches the teacher's next-token logits and attention outputs."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

Objective = Literal["teacher", "text"]
ATTENTION = 1.0  # a relative error of 1 in attention adds this many bits to the loss
SILENT = 1e-12  # avoids division by zero if a layer's outputs for a sequence are all 0


class Speaker:
    """A language model, student or teacher, whose attention outputs can be recorded and replaced.

    ``model`` holds the parameters and ``logits(tokens)`` runs the model. ``attention`` lists its attention
    layers in order; the first output of each is ``[b, t, m]``. Hooks are installed only inside a ``with``
    block. ``branches`` lists the layers whose index branches learn, if there are some.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Sequence[nn.Module],
        logits: Callable[[Tensor], Tensor],
        branches: Sequence[nn.Module] = (),
    ):
        self.model: nn.Module = model
        self.branches: Sequence[nn.Module] = branches
        self._attention, self._logits = attention, logits
        self._heard: dict[int, Tensor] | None = None  # outputs of the layers while ``listen`` runs
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
        """Return the logits ``[b, t, vocabulary]`` after each of ``tokens`` ``[b, t]``."""
        return self._logits(tokens)

    def listen(self, tokens: Tensor, given: Sequence[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and the output ``[b, t, m]`` of each attention layer.

        ``given`` may hold the outputs of the teacher's attention layers. They replace this model's outputs in
        later layers, and no gradient flows from a layer to earlier ones. Each layer then gets the input of
        the teacher's layer and learns on its own.
        """
        self._given, self._heard = given, {}
        try:
            return self._logits(tokens), [self._heard[index] for index in range(len(self._attention))]
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
    """The losses between a student and its teacher, as scalars.

    - ``kl``: ``KL(teacher || student)`` of the next-token distributions, bits per token.
    - ``attention``: relative error ``|y - y'|^2 / |y|^2`` of the attention outputs, the mean over layers and
      sequences.
    - ``text``: cross-entropy of the student on the text, bits per token.
    """

    kl: Tensor
    attention: Tensor
    text: Tensor

    def loss(self, progress: float, objective: Objective) -> Tensor:
        """Return the training loss at ``progress``, from 0 at the start to 1 at the end.

        The attention error fades out, so only the logits count in the end. With ``"teacher"`` the KL remains,
        which suits teachers that were trained on more than this text. With ``"text"`` the student learns the
        text, and the KL fades out, too (Clark et al., 2019, arXiv 1907.04829), because such a student soon
        outgrows its teacher. Results for a GQA student whose teacher is still learning, in bits per byte
        (tiny preset of examples/finetune_gqa.py):

            300 steps   2.249 without the text          2.223 with the text
            500 steps   2.168 with a constant teacher   2.164 with a fading teacher
        """
        fading = (1 - progress) * ATTENTION * self.attention
        return self.kl + fading if objective == "teacher" else self.text + (1 - progress) * self.kl + fading


def differences(student: Speaker, teacher: Speaker, tokens: Tensor) -> Differences:
    """Return the losses of a student on ``tokens`` ``[b, t + 1]``; only the student gets gradients.

    Each layer of the student reads the student's own residual stream, so a later layer can make up for the
    errors of an earlier one.
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
    """Return the attention error of a student whose layers all read the inputs of the teacher's layers.

    The outputs of the teacher's layers replace those of the student's. No layer's error then depends on the
    weights of another, so all layers learn at once, from one forward of the teacher. ``tokens`` are
    ``[b, t + 1]``.
    """
    with torch.no_grad():
        _, taught = teacher.listen(tokens[:, :-1])
    _, learnt = student.listen(tokens[:, :-1], given=taught)
    return _relative_error(taught, learnt)


def text_bits(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return a model's cross-entropy in bits ``[b, t]`` for ``tokens`` ``[b, t + 1]`` except the first."""
    nats = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return nats.view(len(tokens), -1) / math.log(2)


def _relative_error(taught: Sequence[Tensor], learnt: Sequence[Tensor]) -> Tensor:
    """Return the relative error of the student's outputs, averaged over all layers and sequences."""
    errors = []
    for expected, got in zip(taught, learnt, strict=True):
        expected, got = expected.float().flatten(1), got.float().flatten(1)
        size = expected.square().sum(1).clamp_min(SILENT)
        errors.append(((expected - got).square().sum(1) / size).mean())
    return torch.stack(errors).mean()


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, Tensor) else value
