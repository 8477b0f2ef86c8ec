"""Registration of tensors that mask and score functions read, as parameters or buffers of a layer."""

import torch
from torch import nn

from ..call.selection import refuse_selection
from ..masks.band import AnyMask, Mask, refuse_mask
from ..masks.function import MaskFunction
from ..scores import ScoreFunction
from .tensor_parallel import ALL_HEADS, Share


class CapturedTensors(nn.Module):
    """The tensors that a mask or score function captures, registered as parameters or buffers.

    Calling the module returns the function bound to its current tensors.
    """

    def __init__(self, function: MaskFunction | ScoreFunction, names: list[str]):
        super().__init__()
        self._names, self._are_given = names, True
        # Bind the function to empty tensors, so that it does not keep the captured tensors alive.
        self._function = function.reading([x.new_empty(0) for x in function.tensors])
        for name, x in zip(names, function.tensors, strict=True):
            if isinstance(x, nn.Parameter):
                self.register_parameter(name, x)
            else:
                self.register_buffer(name, x, persistent=False)

    def forward(self, share: Share = ALL_HEADS) -> MaskFunction | ScoreFunction:
        """Return the function bound to the whole tensors; its head indices count the heads of all ranks."""
        return self._function.reading([share.gathered(getattr(self, name)) for name in self._names])

    def _apply(self, fn, recurse=True):
        """Apply ``fn``, but restore the values after ``to_empty``, since they cannot be recomputed."""
        given = [getattr(self, name).detach() for name in self._names]
        super()._apply(fn, recurse)
        with torch.no_grad():
            for name, x in zip(self._names, given, strict=True):
                if not (x.is_meta or getattr(self, name).is_meta):
                    getattr(self, name).copy_(x)
        self._are_given = self._are_given and not any(x.is_meta for x in given)
        return self

    def reset_parameters(self) -> None:
        """Leave the captured tensors unchanged, since they have no initial values to reset to.

        Raises:
            RuntimeError: the tensors were created on the meta device and have no values.
        """
        if not self._are_given:
            raise RuntimeError(
                f"{', '.join(self._names)}: expected tensors with values in the function of a mask or score, "
                "got some "
                'on the meta device; make them outside `with torch.device("meta")`'
            )


def captured_by_mask(mask: AnyMask, num_heads: int) -> CapturedTensors | None:
    """Return the tensors that a layer's mask captures; None for a plain Mask, which reads none.

    Raises:
        ValueError: the number of heads in a tensor differs from the layer's.
        NotImplementedError: the mask selects keys by lists.
    """
    if isinstance(mask, Mask):
        return None
    refuse_selection(
        mask, "in the constructor of a layer", "its lists belong to one call; pass it to the layer as mask="
    )
    mask.check({"h": num_heads})
    return CapturedTensors(mask, [f"t{n}" for n in range(len(mask.tensors))])


def captured_by_score(score: ScoreFunction | None, num_heads: int) -> CapturedTensors | None:
    """Return the tensors that a layer's score function captures, by parameter name; None without a function.

    Raises:
        TypeError: ``score`` was not made by score_mod().
        ValueError: the number of heads in a tensor differs from the layer's.
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
    """Return the intersection of the masks of a layer and of a call, and the layer's score function.

    Raises:
        TypeError: ``mask`` is not a mask.
    """
    own = layer.mask if layer.mask_tensors is None else layer.mask_tensors()
    if mask is not None:
        if not isinstance(mask, AnyMask):
            refuse_mask(mask)
        own = own & mask
    return own, None if layer.score is None else layer.score(share)
