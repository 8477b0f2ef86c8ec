"""What the functions of indices of a layer read, as the layer's own: it moves and is saved with it, and may
train.
"""

import torch
from torch import nn

from ..masks.band import AnyMask, Mask, refuse_mask
from ..masks.function import MaskFunction
from ..scores import ScoreFunction
from .tensor_parallel import ALL_HEADS, Share


class CapturedTensors(nn.Module):
    """The tensors of a function: parameters where they are such, buffers else. A call gives the function of
    them.
    """

    def __init__(self, function: MaskFunction | ScoreFunction, names: list[str]):
        super().__init__()
        self._names, self._are_given = names, True
        self._function = function.reading(
            [x.new_empty(0) for x in function.tensors]
        )  # which keeps none alive
        for name, x in zip(names, function.tensors, strict=True):
            if isinstance(x, nn.Parameter):
                self.register_parameter(name, x)
            else:
                self.register_buffer(name, x, persistent=False)

    def forward(self, share: Share = ALL_HEADS) -> MaskFunction | ScoreFunction:
        """The function of what the tensors are now, whole, since indices are of all heads whatever a rank's
        share.
        """
        return self._function.reading([share.gathered(getattr(self, name)) for name in self._names])

    def _apply(self, fn, recurse=True):
        """``to_empty`` leaves values that were given, for nobody could make them again."""
        given = [getattr(self, name).detach() for name in self._names]
        super()._apply(fn, recurse)
        with torch.no_grad():
            for name, x in zip(self._names, given, strict=True):
                if not (x.is_meta or getattr(self, name).is_meta):
                    getattr(self, name).copy_(x)
        self._are_given = self._are_given and not any(x.is_meta for x in given)
        return self

    def reset_parameters(self) -> None:
        """Nothing: they were given, and nobody here knows to what they could be reset.

        Raises:
            RuntimeError: they were given on the meta device, which has no values.
        """
        if not self._are_given:
            raise RuntimeError(
                f"{', '.join(self._names)}: expected tensors with values in the function of a mask or score, "
                "got some "
                'on the meta device; make them outside `with torch.device("meta")`'
            )


def captured_by_mask(mask: AnyMask, num_heads: int) -> CapturedTensors | None:
    """The tensors of a layer's mask; None for a band.

    Raises:
        ValueError: a tensor of it is of other heads than the layer.
    """
    if isinstance(mask, Mask):
        return None
    mask.check({"h": num_heads})
    return CapturedTensors(mask, [f"t{n}" for n in range(len(mask.tensors))])


def captured_by_score(score: ScoreFunction | None, num_heads: int) -> CapturedTensors | None:
    """The tensors of a layer's scores, by the names of the function's parameters; None where it has no
    function.

    Raises:
        TypeError: it is not what score_mod() makes.
        ValueError: a tensor of it is of other heads than the layer.
    """
    if score is None:
        return None
    if type(score) is not ScoreFunction:
        raise TypeError(f"score: expected what score_mod() makes, got {type(score).__name__}")
    score.check({"h": num_heads})
    return CapturedTensors(score, list(score.names))


def own_functions(
    layer: nn.Module, mask: AnyMask | None, share: Share
) -> tuple[AnyMask, ScoreFunction | None]:
    """A layer's mask within a call's, and its score; ``share`` is what this rank has of the heads.

    Raises:
        TypeError: the call's mask is none.
    """
    own = layer.mask if layer.mask_tensors is None else layer.mask_tensors()
    if mask is not None:
        if not isinstance(mask, AnyMask):
            refuse_mask(mask)
        own = own & mask
    return own, None if layer.score is None else layer.score(share)
