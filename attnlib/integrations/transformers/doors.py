"""The attention and mask functions that transformers calls, and what the one must know of the other.

transformers asks for masks first, with a config, and then calls attention, with a module. A mask that is None stands
for what flags of the module say. Models whose flags say something else than the mask was asked for, or whose layers
attend to other keys, would be silently wrong: so the answers are kept for each config, and attention looks them up.
"""

import warnings
from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from . import attention, masks
from .choosing import classes_of, only_eager, watch_choices, why_refused
from .handed import HandedMask, handed
from .paged import NAME
from .replacing import ReplacedAttention

REMEMBERED = 1024  # pairs of lengths for each config: a checkpointed layer runs again long after its mask was made


class Doors:
    """The mask and attention functions that are registered, and what they remember from a mask to its attention."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[ref[Any], OrderedDict[tuple[int, int], set[str]]]] = {}  # by a config's id
        self.reasons: dict[type, str | None] = {}  # why a class of models is refused
        self.kinds: dict[tuple[type, str], list[type[PreTrainedModel]]] = {}  # by a config's type and a file
        self.calls: int = 0  # of attention
        self.waiting: WeakKeyDictionary[PreTrainedModel, list[Any]] = WeakKeyDictionary()  # hooks before a forward
        self.running: list[tuple[int, int]] = []  # ids of these, and the calls at their beginning
        self.warned: set[type] = set()

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """:func:`.masks.attention_mask`, remembered."""
        if torch.compiler.is_compiling():
            return masks.attention_mask(*args, **kwargs)
        named = dict(zip(masks.PLACES, args, strict=False)) | kwargs
        config, back = named.get("config"), named.get("attention_mask")
        kinds = self._kinds(config)
        self._refuse_kinds(kinds)
        meaning = masks.meaning_of(named.get("mask_function", masks.causal_mask_function))
        is_row = named["q_length"] == 1
        if isinstance(back, HandedMask) and back.numbers is not None:
            return back.numbers
        if isinstance(back, HandedMask) and back.meaning not in (None, meaning) and not is_row:
            return back  # as transformers hands on a mask of four dimensions, whatever is asked for now
        made = masks.attention_mask(**named)
        if isinstance(made, HandedMask):
            made.meaning, made.keys = None if is_row else meaning, named["kv_length"]
        if made is not None and made.dim() == 4 and kinds and all(only_eager(kind) for kind in kinds):
            added = {name: named[name] for name in ("dtype",) if name in named}
            return torch.zeros((), **added).masked_fill(~made, torch.finfo(added.get("dtype", torch.float32)).min)
        return self._remembered(config, named, meaning) if made is None and config is not None else made

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """:func:`.attention.attention_forward`, with the flags that the mask was made for."""
        if not torch.compiler.is_compiling():
            self.calls += 1
            kwargs |= self._flags(module, query, key, attention_mask, kwargs)
            if isinstance(attention_mask, HandedMask) and (attention_mask.is_whole or attention_mask.dim() != 2):
                attention_mask = None if attention_mask.is_whole else attention_mask.plain
        return attention.attention_forward(module, query, key, value, attention_mask, **kwargs)

    def expect(self, model: PreTrainedModel) -> None:
        """Look at the class of a model that has chosen attnlib, and, at its first forward, whether attention came here.

        Raises:
            NotImplementedError: models of this class would be wrong, or never call it.
        """
        self._refuse_kinds([type(model)])
        if model not in self.waiting:
            hooks = model.register_forward_pre_hook(begin), model.register_forward_hook(end, always_call=True)
            self.waiting[model] = list(hooks)

    def begin(self, model: PreTrainedModel) -> None:
        """Count from here, if this is the first forward of the model."""
        if model in self.waiting:
            self.running.append((id(model), self.calls))

    def end(self, model: PreTrainedModel, output: Any) -> None:
        """Warn of the class of the outermost model if it has attention, none of which came here."""
        at = next((n for n, (key, _) in enumerate(self.running) if key == id(model)), None)
        if at is None:
            return
        calls, kind = self.running[at][1], type(model)
        del self.running[at:]
        if output is None:  # it raised
            return
        for hook in self.waiting.pop(model):
            hook.remove()
        if at == 0 and calls == self.calls and kind not in self.warned and should_have_called(model):
            self.warned.add(kind)
            warnings.warn(
                f'{kind.__name__}: attn_implementation="attnlib" was chosen, and its first forward never called it; '
                "what it computes is its own attention",
                stacklevel=2,
            )

    def _kinds(self, config: Any, module: nn.Module | None = None) -> list[type[PreTrainedModel]]:
        at = type(config), type(module).__module__ if module is not None else ""
        if at not in self.kinds:
            self.kinds[at] = classes_of(config, module)
        return self.kinds[at]

    def _refuse_kinds(self, kinds: list[type[PreTrainedModel]]) -> None:
        """Raise if all these classes are refused, in the name of the first."""
        for kind in kinds:
            if kind not in self.reasons:
                self.reasons[kind] = why_refused(kind)
        if kinds and all(self.reasons[kind] for kind in kinds):
            raise NotImplementedError(
                f'{kinds[0].__name__}: attn_implementation="attnlib" is refused, since {self.reasons[kinds[0]]}; use '
                '"eager", or choose for parts of a model, as attn_implementation={"text_config": "attnlib"}'
            )

    def _remembered(self, config: Any, named: dict[str, Any], meaning: str) -> Tensor | None:
        """None, or a mask that says as much where None already says something else of masks of this size."""
        at, sizes = id(config), (named["q_length"], named["kv_length"])
        found = self.answers.get(at)
        if found is None or found[0]() is not config:
            found = self.answers[at] = (ref(config, lambda _: self.answers.pop(at, None)), OrderedDict())
        known = found[1].setdefault(sizes, set())
        found[1].move_to_end(sizes)
        if len(found[1]) > REMEMBERED:
            found[1].popitem(last=False)
        if not known or named["q_length"] == 1 or (meaning == "full") == ("full" in known):
            known.add(meaning)
            return None
        offset, length = named.get("kv_offset", 0), named["kv_length"]
        whole = torch.ones(named["batch_size"], length, dtype=torch.bool, device=named.get("device"))
        return handed(nn.functional.pad(whole, (offset, 0)), meaning=meaning, keys=length, is_whole=True)

    def _flags(
        self, module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, given: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the flags that the mask stands for, if those of the module say something else.

        Raises:
            NotImplementedError: the mask was made for other keys, or changed, or says what flags cannot.
        """
        said = attention.flags_of(module, given.get("is_causal"), given.get("sliding_window"))
        queries, keys = query.shape[2], key.shape[2]
        if isinstance(attention_mask, HandedMask):
            if attention_mask.is_changed or attention_mask.keys not in (None, keys):
                raise _other_keys(module, keys, {attention_mask.keys})
            meant = {attention_mask.meaning or said}
        elif attention_mask is None and given.get("cu_seq_lens_q") is None:
            meant = self._meant(module, (queries, keys), said)
        else:
            return {}
        if queries == 1 or said in meant:
            return {}
        if len(meant) == 1 and (meaning := next(iter(meant))) in ("full", "causal"):
            return {"is_causal": meaning == "causal", "sliding_window": None}
        raise NotImplementedError(
            f"{type(module).__name__}: expected attention that is {' or '.join(sorted(meant))}, as its mask was asked "
            f'for, got flags that say {said}; use "eager" for it'
        )

    def _meant(self, module: nn.Module, sizes: tuple[int, int], said: str) -> set[str]:
        """Return the masks that None may stand for at these sizes; ``said``, by flags, if none was made."""
        config = getattr(module, "config", None)
        found = self.answers.get(id(config))
        if found is None or found[0]() is not config:
            return {said}
        if sizes in found[1]:
            return found[1][sizes]
        if said == "full":  # as cross-attention, whose encoder made no mask
            return {said}
        raise _other_keys(module, sizes[1], {keys for queries, keys in found[1] if queries == sizes[0]})


def _other_keys(module: nn.Module, keys: int, asked: set[int | None]) -> NotImplementedError:
    return NotImplementedError(
        f'{type(module).__name__}: expected keys of the mask that attn_implementation="attnlib" was asked for '
        f"({sorted(x for x in asked if x is not None)} of them), got {keys}; the model adds keys or changes its mask "
        'after it was made: use "eager" for it'
    )


def should_have_called(model: nn.Module) -> bool:
    """True if a model has attention of transformers that still is to be attnlib's: compiled calls are not counted."""
    modules = list(model.modules())
    is_compiled = any("forward" in vars(x) or hasattr(x, "_orig_mod") or x._compiled_call_impl for x in modules)
    has_attention = any("attention" in type(x).__name__.lower() for x in modules)
    asks = any(getattr(getattr(x, "config", None), "_attn_implementation", None) == NAME for x in modules)
    return has_attention and asks and not is_compiled and not any(isinstance(x, ReplacedAttention) for x in modules)


def doors() -> Doors | None:
    """Return attnlib's functions if they are registered with transformers."""
    registered = AttentionInterface().get(NAME)
    owner = getattr(registered, "__self__", None)
    return owner if isinstance(owner, Doors) else None


def begin(model: PreTrainedModel, args: tuple[Any, ...]) -> None:
    """Before a forward of a model; a function, so that models are copied and pickled with it."""
    if not torch.compiler.is_compiling() and (ours := doors()) is not None:
        ours.begin(model)


def end(model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
    """After a forward."""
    if not torch.compiler.is_compiling() and (ours := doors()) is not None:
        ours.end(model, output)


def register_doors() -> None:
    """Make attention and masks known to transformers, and look where it chooses an implementation."""
    if doors() is not None:
        return
    ours = Doors()
    AttentionInterface.register(NAME, ours.attend)
    AttentionMaskInterface.register(NAME, ours.mask)
    watch_choices(NAME, chosen)


def chosen(model: PreTrainedModel) -> None:
    """A model has chosen attnlib."""
    if (ours := doors()) is not None:
        ours.expect(model)
