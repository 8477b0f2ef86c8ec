"""What a layer prints of itself."""

from torch import Tensor, nn

from ..scores import Score

# A scale there always is.
OPTIONS = (*Score._fields[1:], "score", "temperature", "dropout_p", "context_parallel", "backend")


def described(layer: nn.Module, *sizes: str) -> str:
    """The sizes of these names, the mask and the rope, and which options are not as they are by default."""
    words = [f"{name}={value}" for name in sizes if (value := getattr(layer, name)) is not None]
    words.append(f"mask={layer.mask.spelled}")
    words += [] if layer.rope is None else [f"rope=Rope({layer.rope.dim}, theta={layer.rope.theta:,})"]
    for name in OPTIONS:
        value = getattr(layer, name, None)
        if isinstance(value, Tensor | nn.Module):
            words.append(name)
        elif value:
            words.append(f"{name}={value}")
    return ", ".join(words)
