"""Initialising a layer whose modules may have been replaced."""

from collections.abc import Iterator

from torch import nn


def reset_children(layer: nn.Module) -> None:
    """Call ``reset_parameters`` of every module in ``layer``; of a module without one, those of the modules in it.

    Raises:
        TypeError: a module owns parameters and has no ``reset_parameters``; then nothing is reset.
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
                f"{path}{name}: expected a module with reset_parameters(), got {type(module).__name__} with parameters "
                f"{owned} and without it; define it there, or initialise the modules one by one"
            )
        yield from _resettable(module, f"{path}{name}.")
