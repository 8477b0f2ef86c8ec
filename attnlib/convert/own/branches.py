"""Add new index branches to converted layers, with which they can learn to attend to few keys."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from ...models.own_form import BranchForm, stored_name
from ..checkpoint.errors import RequestError
from ..checkpoint.layer import ConvertedLayer, ConverterByLayer, LayerShape
from ..checkpoint.model import CheckpointModel
from ..stock import read_config

# The default number of heads. The size of a branch matters little: mass recall of 64 of 256 keys in a byte
# model with heads of 64 channels, after 60 steps of warm-up (a window of 64 keys has 0.931; two CPU cores,
# 2026-11-28, commit 54792671):
#
#   2 heads of 64   4 of 32   4 of 64   8 of 64
#   0.959           0.958     0.961     0.963
HEADS = 4
MOST = 2**20  # of any size, and of the channels of all heads: more is a mistake
NAMES = ("top", "heads", "head_dim", "block_size")


@dataclass(frozen=True, slots=True)
class Branches:
    """The index branches that ``--select`` asks for; without a ``head_dim``, it is that of the layer."""

    top: int
    heads: int = HEADS
    head_dim: int | None = None
    block_size: int = 1

    @classmethod
    def of(cls, text: str) -> "Branches":
        """Parse the value of ``--select``.

        Raises:
            RequestError: a name is unknown, twice there or missing, or a value is not a positive count,
                or too large.

        >>> Branches.of("top=512,heads=8")
        Branches(top=512, heads=8, head_dim=None, block_size=1)
        """
        found: dict[str, int] = {}
        for part in text.split(","):
            name, _, value = (x.strip() for x in part.partition("="))
            if name not in NAMES or name in found:
                wanted = "only once" if name in found else f"one of {', '.join(NAMES)}"
                raise RequestError(
                    f"--select: expected {wanted}, as in top=512,heads=4, got {part.strip()!r}"
                )
            if not value.isdecimal() or not 1 <= int(value) <= MOST:
                raise RequestError(f"--select: {name}: expected a count of 1 to {MOST}, got {value!r}")
            found[name] = int(value)
        if (channels := found.get("heads", HEADS) * found.get("head_dim", 1)) > MOST:
            raise RequestError(
                f"--select: heads: expected at most {MOST} channels in all heads, got {channels}"
            )
        if "top" not in found:
            raise RequestError(f"--select: expected top=N, the keys of each query, got {text!r}")
        return cls(**found)

    @property
    def keys(self) -> int:
        """The number of keys that a query may see."""
        return self.top * self.block_size

    def forms(self, model: CheckpointModel) -> list[BranchForm | None]:
        """Return the branch of each layer; None for a layer that sees only some of the keys before a query.

        Raises:
            RequestError: no layer can have a branch; the message says why.
        """
        from ...integrations.transformers.own import branch_form

        config = read_config(model.checkpoint).get_text_config()
        forms, refused = [], ""
        for index in model.layers:
            try:
                forms.append(branch_form(config, index, **asdict(self)))
            except ValueError as error:
                forms.append(None)
                refused = refused or f"layer {index}: {error}"
        if not any(forms):
            raise RequestError(
                f"--select: expected a layer that can choose among all keys, got none; {refused}"
            )
        return forms


def with_branches(
    made: ConverterByLayer, model: CheckpointModel, branches: Sequence[BranchForm | None]
) -> ConverterByLayer:
    """Return a converter that also adds to each layer its branch in ``branches``.

    The weights of a branch are random, and the same for equal requests.
    """
    from ...integrations.transformers.own import new_branch

    config = read_config(model.checkpoint).get_text_config()

    def convert_layer(weights: Mapping[str, Tensor], shape: LayerShape) -> ConvertedLayer:
        layer, branch = made.convert_layer(weights, shape), branches[shape.index]
        if branch is None:
            return layer
        form = replace(layer.form, select=branch)
        new = {
            stored_name(name): x.to(model.dtype) for name, x in new_branch(config, shape.index, form).items()
        }
        return replace(layer, weights={**layer.weights, **new}, form=form)

    kinds = (replace(form, select=branch) for form, branch in zip(made.kinds, branches, strict=True))
    return ConverterByLayer(convert_layer, tuple(kinds))
