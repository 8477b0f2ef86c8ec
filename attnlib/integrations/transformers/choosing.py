"""Decide which transformers model classes may select ``attn_implementation="attnlib"``, and refuse others.

transformers registers attention functions only by name. Any model class may select one, even if its attention
never calls the function or expects other masks than attnlib makes. The rules use the flags of the class and
the source of its attention; there is no list of models.
"""

import linecache
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

ATTENTION = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)  # transformers' own pattern
INTERFACE = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)")
BY_NAME = re.compile(r"_CLASSES\[[\w.]*_attn_implementation\]")  # a lookup in a model's own table
ASKS_FOR_MASKS = re.compile(r"\bcreate_\w*mask\w*\(|\bcreate_masks_for_generate\(")
SAYS_CAUSAL = re.compile(r"\bis_causal\s*=(?!\s*(False\b|None\b|is_causal\b|=))")
SAYS_OTHERWISE = re.compile(r"\bis_causal\s*(:[^=\n]*)?=(?!\s*(True\b|=))")


def why_refused(kind: type[PreTrainedModel]) -> str | None:
    """Return the reason why models of this class cannot use attnlib's attention, or None if they can.

    A class that looks up attention functions in a table of its own is refused. Otherwise, a class with the
    flag ``_supports_attention_backend`` is accepted. A class without the flag is accepted if its attention
    calls transformers' attention interface, and in some cases if it has no attention or cannot generate.
    """
    source = source_of(kind)
    if BY_NAME.search(source):
        return "it looks its attention up in its own table, which has no other implementations"
    if kind._supports_attention_backend:
        return None
    without = "its _supports_attention_backend is False, and "
    if not ATTENTION.search(source):
        is_served = kind._supports_sdpa or not kind.can_generate()
        return None if is_served else without + "it has no attention that transformers could replace"
    if not INTERFACE.search(source):
        is_served = not kind.can_generate() and not ASKS_FOR_MASKS.search(source)
        return None if is_served else without + "its attention never calls the selected implementation"
    return None


def source_of(kind: type[PreTrainedModel]) -> str:
    """Return the source of the modules that define a model class and its bases, or "" if there is none."""
    bases = [
        base for base in kind.__mro__ if issubclass(base, PreTrainedModel) and base is not PreTrainedModel
    ]
    files = [
        getattr(sys.modules.get(name), "__file__", None)
        for name in dict.fromkeys(x.__module__ for x in bases)
    ]
    return "\n".join("".join(linecache.getlines(file)) for file in files if file)


def classes_of(config: type) -> list[type[PreTrainedModel]]:
    """Return the model classes that use a config type, as found in the modeling file beside it."""
    name = config.__module__.replace("configuration_", "modeling_")
    found = vars(sys.modules.get(name, object)).values()
    return [
        x
        for x in found
        if isinstance(x, type)
        and issubclass(x, PreTrainedModel)
        and x.__module__ == name
        and x.config_class is config
    ]


def sources_of(config: type) -> set[str]:
    """Return the source code of the models that use a config type; they usually share one file."""
    return {source_of(kind) for kind in classes_of(config)}


@torch.compiler.assume_constant_result
def some_say_causal(config: type) -> bool:
    """True if the source of a model with this config type contains attention that declares itself causal."""
    return any(map(SAYS_CAUSAL.search, sources_of(config)))


def all_say_causal(config: type) -> bool:
    """True if all attention in the source of models with this config type declares itself causal."""
    sources = sources_of(config)
    return any(map(SAYS_CAUSAL.search, sources)) and not any(map(SAYS_OTHERWISE.search, sources))


def only_eager(kind: type[PreTrainedModel]) -> bool:
    """True if a model class supports no attention implementation except ``eager``, by its flags."""
    return not (kind._supports_sdpa or kind._supports_flash_attn or kind._supports_flex_attn)


class Probe(PreTrainedModel):
    """A model without layers, to test how transformers selects an attention implementation."""

    config_class = PreTrainedConfig
    _supports_attention_backend = True
    was_asked = False

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)


def watch_choices(name: str, chosen: Callable[[PreTrainedModel], None]) -> bool:
    """Call ``chosen`` with every model that selects attention implementation ``name``, before it has weights.

    transformers selects the implementation in a private method, which may change. The hook into that method
    is therefore first tried on a model without layers. If this fails, the method is restored, and the result
    is False; unsuitable models are then refused only when they request a mask or call attention.
    """
    given, setter = (
        vars(PreTrainedModel).get(f"{verb}_attn_implementation") for verb in ("get_correct", "set")
    )
    if hasattr(given, "of_attnlib"):
        return True
    if given is None or setter is None:
        return False

    @wraps(given)
    def decided(self: PreTrainedModel, *args: Any, **kwargs: Any) -> str:
        decision = given(self, *args, **kwargs)
        if decision == name and isinstance(self, Probe):
            Probe.was_asked = True
        elif decision == name:
            chosen(self)
        return decision

    @wraps(setter)
    def changed(self: PreTrainedModel, attn_implementation: str | dict, *args: Any, **kwargs: Any) -> None:
        whole = attn_implementation.get("") if isinstance(attn_implementation, dict) else attn_implementation
        if whole == name:
            chosen(self)  # validate even if transformers would only log a message
        setter(self, attn_implementation, *args, **kwargs)

    decided.of_attnlib = True
    PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation = (
        decided,
        changed,
    )
    Probe.was_asked = False
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        Probe(PreTrainedConfig(attn_implementation=name))
    if not Probe.was_asked:
        PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation = (
            given,
            setter,
        )
    return Probe.was_asked
