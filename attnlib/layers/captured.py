"""What the functions of indices of a layer read, as the layer's own: it moves and is saved with it, and may train."""

from inspect import signature

from torch import Tensor, nn

from ..mask import AnyMask, Mask
from ..mask_function import MaskFunction
from ..scores import ScoreFunction


class Captured(nn.Module):
    """The tensors of a function: parameters where they are such, buffers else. A call gives the function of them."""

    def __init__(self, function: MaskFunction | ScoreFunction, names: list[str]):
        super().__init__()
        self._names = names
        self._function = function.reading([x.new_empty(0) for x in function.tensors])  # which keeps none alive
        for name, x in zip(names, function.tensors, strict=True):
            if isinstance(x, nn.Parameter):
                self.register_parameter(name, x)
            else:
                self.register_buffer(name, x, persistent=False)

    def forward(self) -> MaskFunction | ScoreFunction:
        """The function of what the tensors are now."""
        return self._function.reading([getattr(self, name) for name in self._names])

    def reset_parameters(self) -> None:
        """Nothing: they were given, and nobody here knows to what they could be reset."""


def captured_by_mask(mask: AnyMask) -> Captured | None:
    """The tensors of a layer's mask; None for a band."""
    return None if isinstance(mask, Mask) else Captured(mask, [f"t{n}" for n in range(len(mask.tensors))])


def captured_by_score(score: ScoreFunction | None) -> Captured | None:
    """The tensors of a layer's scores, by the names of the function's parameters; None where it has no function.

    Raises:
        TypeError: it is not what score_mod() makes.
    """
    if score is None:
        return None
    if type(score) is not ScoreFunction:
        raise TypeError(f"score: expected what score_mod() makes, got {type(score).__name__}")
    names = list(signature(score.function).parameters)[len(("score", "b", "h", "i", "j")) :]
    known = [name for name, x in zip(names, score.arguments, strict=False) if isinstance(x, Tensor)]
    whole = len(known) == len(score.tensors)  # not so where the function takes *tensors
    return Captured(score, known if whole else [f"t{n}" for n in range(len(score.tensors))])


def function_options(layer: nn.Module, mask: AnyMask | None, *, is_shared: bool) -> dict[str, object]:
    """A layer's mask within a call's, and its score; ``is_shared`` says that this rank has some of the heads alone.

    Raises:
        TypeError: the call's mask is none.
        NotImplementedError: a function, for which heads would count from 0 on every rank.
    """
    own = layer.mask if layer.mask_tensors is None else layer.mask_tensors()
    if mask is not None:
        if not isinstance(mask, AnyMask):
            raise TypeError(f"mask: expected a Mask such as CAUSAL or what mask_mod() makes, got {type(mask).__name__}")
        own = own & mask
    score = None if layer.score is None else layer.score()
    if is_shared and not (isinstance(own, Mask) and score is None):
        raise NotImplementedError("tensor parallelism: masks and scores by function do not know a rank's heads yet")
    return {"mask": own, "score": score}
