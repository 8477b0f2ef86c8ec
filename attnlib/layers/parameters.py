"""Constructor helpers of layers: head counts, biases, ALiBi slopes, initialization and the repr."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from ..internal.checks import check_count
from ..scores import Score

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# A layer's repr prints these options if they are set. The scale is omitted, since it is always set.
OPTIONS = (*Score._fields[1:], "score", "temperature", "values", "gate", "dropout_p", "context_parallel")
OPTIONS += ("backend",)


def reset_children(layer: nn.Module) -> None:
    """Call ``reset_parameters`` of every submodule; a submodule without the method resets its children.

    Raises:
        TypeError: a module owns parameters but has no ``reset_parameters``. Nothing is reset then.
    """
    for module in list(_resettable(layer)):
        module.reset_parameters()


def _resettable(parent: nn.Module, path: str = "") -> Iterator[nn.Module]:
    for name, module in parent.named_children():
        if callable(getattr(module, "reset_parameters", None)):
            yield module
            continue
        owned = [own for own, _ in module.named_parameters(recurse=False)]
        if owned:
            raise TypeError(
                f"{path}{name}: expected a module with reset_parameters(), got {type(module).__name__}, "
                f"which has parameters {owned} but not the method; define it, or initialize each module"
            )
        yield from _resettable(module, f"{path}{name}.")


def biased(bias: bool | tuple[str, ...], output_bias: bool | None) -> tuple[str, ...]:
    """Return the names of the projections that have a bias.

    ``bias`` is a tuple of their names, or a bool for q, k and v; ``output_bias`` is a bool for o.

    Raises:
        TypeError: an argument has another type.
        ValueError: a name is unknown, or ``output_bias`` comes with a tuple of names.
    """
    if output_bias is not None and not isinstance(output_bias, bool):
        raise TypeError(f"output_bias: expected a bool, got {type(output_bias).__name__}")
    if isinstance(bias, bool):
        output_bias = bias if output_bias is None else output_bias
        return (PROJECTIONS[:3] if bias else ()) + (PROJECTIONS[3:] if output_bias else ())
    if not isinstance(bias, tuple):
        raise TypeError(f"bias: expected a bool or a tuple of projection names, got {type(bias).__name__}")
    unknown = [name for name in bias if name not in PROJECTIONS]
    if unknown or output_bias is not None:
        wrong = f"{unknown[0]!r}" if unknown else f"output_bias={output_bias} with names"
        raise ValueError(f"bias: expected a bool or some of {', '.join(PROJECTIONS)}, got {wrong}")
    return bias


def check_counts(sizes: Mapping[str, int]) -> None:
    """Raise ValueError or TypeError unless each named size is an int of at least 1."""
    for name, size in sizes.items():
        check_count(name, size, least=1)


def not_none(**options: float | None) -> dict[str, float]:
    """Return the options that are not None."""
    return {name: x for name, x in options.items() if x is not None}


def head_dims(
    hidden_size: int, num_heads: int, head_dim: int | None, v_head_dim: int | None
) -> tuple[int, int]:
    """Return the head dimensions of keys and of values, with defaults for None.

    Raises:
        ValueError, TypeError: a dimension is not a positive int, or ``head_dim`` is None and ``num_heads``
            does not divide ``hidden_size``.
    """
    for name, value in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        if value is not None:
            check_count(name, value, least=1)
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(
            f"num_heads: expected a divisor of hidden_size={hidden_size}, got {num_heads}; or pass head_dim="
        )
    head_dim = hidden_size // num_heads if head_dim is None else head_dim
    return head_dim, head_dim if v_head_dim is None else v_head_dim


def check_values(values: str | None, head_dim: int, v_head_dim: int) -> None:
    """Raise ValueError unless ``values`` is None, or "keys" with values as wide as keys."""
    if values is not None and not (isinstance(values, str) and values == "keys"):
        raise ValueError(f'values: expected "keys" or None, got {values!r}')
    if values is not None and v_head_dim != head_dim:
        raise ValueError(f'v_head_dim: expected head_dim={head_dim} with values="keys", got {v_head_dim}')


def published_slopes(num_heads: int) -> list[float]:
    """Return the ALiBi slopes of the paper: a geometric series for each power of two.

    Other head counts use the series of the next lower power of two, and then every other term of the series
    of the next higher power.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]


def described(layer: nn.Module, *sizes: str) -> str:
    """Return the repr of a layer: the named sizes, its mask, its rope, and the options that are set."""
    words = [f"{name}={value}" for name in sizes if (value := getattr(layer, name)) is not None]
    words.append(f"mask={layer.mask.spelled}")
    words += [] if layer.own_keys else ["own_keys=False"]
    if (rope := layer.rope) is not None:
        axes = "" if rope.axes is None else f", axes={rope.axes}"
        words.append(f"rope=Rope({rope.dim}, theta={rope.theta:,}{axes})")
    for name in OPTIONS:
        value = getattr(layer, name, None)
        if isinstance(value, Tensor | nn.Module):
            words.append(name)
        elif value:
            words.append(f"{name}={value}")
    return ", ".join(words)
