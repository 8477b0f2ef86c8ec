"""The rules by which ``attn_implementation="attnlib"`` refuses a class of models, and where they are applied.

transformers registers attention by name only: any class may choose it, also one whose attention never calls
it, or reads masks that attnlib makes in another way. The rules look at the flags of the class and at the
source of its attention; there is no list of models.
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

ATTENTION = re.compile(
    r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE
)  # as transformers itself finds them
INTERFACE = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)")
BY_NAME = re.compile(r"_CLASSES\[[\w.]*_attn_implementation\]")  # a table that has no entry of ours
ASKS_FOR_MASKS = re.compile(r"\bcreate_\w*mask\w*\(|\bcreate_masks_for_generate\(")
SAYS_CAUSAL = re.compile(r"\bis_causal\s*=(?!\s*(False\b|None\b|is_causal\b|=))")
SAYS_OTHERWISE = re.compile(r"\bis_causal\s*(:[^=\n]*)?=(?!\s*(True\b|=))")


def why_refused(kind: type[PreTrainedModel]) -> str | None:
    """The reason why models of this class cannot run on attnlib's attention; None if they can.

    A class with ``_supports_attention_backend`` is trusted. Another one is accepted if its attention calls
    the interface of transformers.
    """
    source = source_of(kind)
    if BY_NAME.search(source):
        return "it looks its attention up in a table of its own, which knows no other implementation"
    if kind._supports_attention_backend:
        return None
    without = "its _supports_attention_backend is False, and "
    if not ATTENTION.search(source):
        is_served = kind._supports_sdpa or not kind.can_generate()
        return None if is_served else without + "it has no attention that transformers could exchange"
    if not INTERFACE.search(source):
        is_served = not kind.can_generate() and not ASKS_FOR_MASKS.search(source)
        return None if is_served else without + "its attention never calls the implementation that was chosen"
    return None


def source_of(kind: type[PreTrainedModel]) -> str:
    """The text of the modules that define a class of models, down from transformers' base; "" where there is
    none.
    """
    bases = [
        base for base in kind.__mro__ if issubclass(base, PreTrainedModel) and base is not PreTrainedModel
    ]
    files = [
        getattr(sys.modules.get(name), "__file__", None)
        for name in dict.fromkeys(x.__module__ for x in bases)
    ]
    return "\n".join("".join(linecache.getlines(file)) for file in files if file)


def classes_of(config: type) -> list[type[PreTrainedModel]]:
    """Return the classes of models with a config of this type, from the file beside it."""
    name = config.__module__.replace("configuration_", "modeling_")
    found = vars(sys.modules.get(name, object)).values()
    kinds = [
        x for x in found if isinstance(x, type) and issubclass(x, PreTrainedModel) and x.__module__ == name
    ]
    return [kind for kind in kinds if kind.config_class is config]


def sources_of(config: type) -> set[str]:
    """Return the texts that define models with a config of this type; most often one for all of them."""
    return {source_of(kind) for kind in classes_of(config)}


@torch.compiler.assume_constant_result
def some_say_causal(config: type) -> bool:
    """True if, by their source, some attention of models with a config of this type tells that it is
    causal.
    """
    return any(map(SAYS_CAUSAL.search, sources_of(config)))


def all_say_causal(config: type) -> bool:
    """True if, by their source, no attention of models with a config of this type is anything but causal."""
    sources = sources_of(config)
    return any(map(SAYS_CAUSAL.search, sources)) and not any(map(SAYS_OTHERWISE.search, sources))


def only_eager(kind: type[PreTrainedModel]) -> bool:
    """True if, by its flags, the class works with no implementation but ``eager``."""
    return not (kind._supports_sdpa or kind._supports_flash_attn or kind._supports_flex_attn)


class Probe(PreTrainedModel):
    """A model without layers, on which the way that transformers chooses an implementation is tried."""

    config_class = PreTrainedConfig
    _supports_attention_backend = True
    was_asked = False

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)


def watch_choices(name: str, chosen: Callable[[PreTrainedModel], None]) -> bool:
    """Call ``chosen`` with each model that chooses the implementation of this ``name``, before it has
    weights.

    transformers decides that in a method which is no public contract. It is tried on a model without layers;
    False if it is not what we know, and is then left as it was: attention and masks refuse by themselves.
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
            chosen(self)  # also of a class that transformers would leave as it is, with a line in a log
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
