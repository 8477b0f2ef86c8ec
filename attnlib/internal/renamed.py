"""Old names of public objects: each raises an error that names the new one."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def module_getattr(
    module: str, renamed: Mapping[str, str], submodules: tuple[str, ...] = ()
) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``: import ``submodules`` when touched, and explain old names.

    Old names raise ImportError, since Python replaces the message of an AttributeError in ``from module
    import name``.
    """

    def __getattr__(name: str) -> Any:
        if name in submodules:
            return import_module(f"{module}.{name}")
        if name in renamed:
            raise ImportError(f"{module}.{name} has been renamed: use {module}.{renamed[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


def field_getattr(renamed: Mapping[str, str]) -> Callable[[object, str], Any]:
    """Return a class's ``__getattr__`` that explains the old names of its fields."""

    def __getattr__(self: object, name: str) -> Any:
        known = type(self).__name__
        if name in renamed:
            raise AttributeError(f"{known}.{name} has been renamed: use {known}.{renamed[name]}")
        raise AttributeError(f"{known!r} object has no attribute {name!r}")

    return __getattr__
