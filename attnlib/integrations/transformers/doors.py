"""The attention and mask functions that attnlib registers with transformers, and the data that they share.

transformers first requests a mask for a config, and later calls attention with a module and that mask. If the
mask is None, only the module's flags (causal, window) say which keys are hidden. Results would be silently
wrong if these flags contradict the requested mask, or if a layer attends to other keys. Therefore each mask
records the request for which it was made. The mask function returns None only if None can mean a single mask
for this config and these lengths, and attention looks up this mask.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from . import attention, masks, trees
from .choosing import all_say_causal, classes_of, only_eager, some_say_causal, watch_choices, why_refused
from .handed import HandedMask, handed
from .means import ReplacedMeansAttention
from .paged import NAME
from .replacing import ReplacedAttention
from .selecting import ReplacedSelectingAttention

Value = TypeVar("Value")
OfConfigs = dict[int, tuple[ref[Any], Value]]  # values by id(config), as configs are not hashable
# The meaning of a mask None is cached for this many pairs of query and key length per config, because
# activation checkpointing reruns a layer long after its mask was made.
MAX_LENGTHS = 1024
SPARED = (ReplacedSelectingAttention, ReplacedMeansAttention)  # layers that take masks [b, t] as well


class RegisteredFunctions:
    """The registered mask and attention functions; attention looks up which masks were requested."""

    def __init__(self) -> None:
        self.answers: OfConfigs[OrderedDict[tuple[int, int], str]] = {}
        self.reasons: dict[type, str | None] = {}  # why a model class is refused
        self.without_trees: dict[type, str | None] = {}  # why a model class cannot compute a tree
        self.flags: OfConfigs[set[bool]] = {}  # values of ``is_causal`` in the layers so far
        self.causal: dict[type, bool] = {}  # True if all attention for a config type is causal
        self.kinds: dict[type, list[type[PreTrainedModel]]] = {}  # model classes by config type
        self.choosing: OfConfigs[set[str]] = {}  # "layers" for a config whose replaced layers choose keys
        self.calls: int = 0  # attention calls so far
        # The hooks of models that have not run yet; a model's first forward removes its hooks.
        self.waiting: WeakKeyDictionary[PreTrainedModel, list[Any]] = WeakKeyDictionary()
        self.running: list[tuple[int, int]] = []  # (model id, ``calls`` before its first forward)
        self.warned: set[type] = set()

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Make a mask with :func:`.masks.attention_mask` and record the request."""
        if torch.compiler.is_compiling():
            if kwargs.get("config") is not None and not some_say_causal(type(kwargs["config"])):
                kwargs["allow_is_causal_skip"] = False  # layers have no causal flag that could replace a mask
            return masks.attention_mask(*args, **kwargs)
        named = dict(zip(masks.PLACES, args, strict=False)) | kwargs
        config, back = named.get("config"), named.get("attention_mask")
        kinds = self._kinds(type(config))
        self._refuse_kinds(kinds)
        meaning = masks.meaning_of(named.get("mask_function", masks.causal_mask_function))
        is_row = named["q_length"] == 1
        if (tree := trees.tree_of(back)) is not None:
            return trees.mask_of(tree, named, self._reasons_against_trees(kinds))
        if isinstance(back, HandedMask) and back.numbers is not None:
            return back.numbers
        if isinstance(back, HandedMask) and back.meaning not in (None, meaning) and not is_row:
            return back  # as transformers does with masks that are 4-dimensional already
        chooses = config is not None and bool(of_config(config, self.choosing, set))
        if chooses:
            named["allow_is_causal_skip"] = True
        made = masks.attention_mask(**named)
        if made is None and chooses:
            made = _whole(named)  # another model of the config may read it
        if made is None and config is not None:
            made = self._hiding_nothing(config, named, meaning)
        if isinstance(made, HandedMask):
            plain = back.plain if isinstance(back, HandedMask) else back
            made.meaning, made.keys = None if is_row else meaning, named["kv_length"]
            offset = int(named.get("q_offset", 0))  # a static cache counts new tokens in its tensor
            made.eager = partial(eager_mask, **named | {"attention_mask": plain, "q_offset": offset})
        if made is not None and made.dim() == 4 and kinds and all(only_eager(kind) for kind in kinds):
            added = {name: named[name] for name in ("dtype",) if name in named}
            return torch.zeros((), **added).masked_fill(
                ~made, torch.finfo(added.get("dtype", torch.float32)).min
            )
        return made

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run :func:`.attention.attention_forward` with the flags that the mask was made for."""
        if not torch.compiler.is_compiling():
            self.calls += 1
            kwargs |= self._flags(module, query, key, attention_mask, kwargs)
            if isinstance(attention_mask, HandedMask) and (
                attention_mask.is_whole or attention_mask.dim() != 2
            ):
                attention_mask = None if attention_mask.is_whole else attention_mask.plain
        return attention.attention_forward(module, query, key, value, attention_mask, **kwargs)

    def expect(self, model: PreTrainedModel) -> None:
        """Validate a model class that selected attnlib, and watch the first forward for attention calls.

        Raises:
            NotImplementedError: models of this class would compute wrong results, or never call attnlib.
        """
        self._refuse_kinds([type(model)])
        if model not in self.waiting:
            self.waiting[model] = [
                model.register_forward_pre_hook(begin),
                model.register_forward_hook(end, always_call=True),
            ]

    def begin(self, model: PreTrainedModel) -> None:
        """Prepare the check in :meth:`end`: note the attention calls made so far, and the causal flags."""
        if model not in self.waiting:
            return
        self.running.append((id(model), self.calls))
        for part in model.modules():
            config, flag = getattr(part, "config", None), vars(part).get("is_causal")
            if config is not None and isinstance(flag, bool):
                of_config(config, self.flags, set).add(flag)

    def end(self, model: PreTrainedModel, output: Any) -> None:
        """Warn after a model's first forward if the model has attention but none of it called attnlib."""
        at = next((n for n, (key, _) in enumerate(self.running) if key == id(model)), None)
        if at is None:
            return
        calls, kind = self.running[at][1], type(model)
        del self.running[at:]
        if output is None:  # the forward raised
            return
        for hook in self.waiting.pop(model):
            hook.remove()
        if at == 0 and calls == self.calls and kind not in self.warned and should_have_called(model):
            self.warned.add(kind)
            warnings.warn(
                f'{kind.__name__}: attn_implementation="attnlib" was selected, but the first forward never '
                "called it; the model computes its own attention instead",
                stacklevel=2,
            )

    def _kinds(self, config: type) -> list[type[PreTrainedModel]]:
        if config not in self.kinds:
            self.kinds[config] = classes_of(config)
        return self.kinds[config]

    def _refuse_kinds(self, kinds: list[type[PreTrainedModel]]) -> None:
        """Raise NotImplementedError if all these model classes are refused; the message names the first."""
        for kind in kinds:
            if kind not in self.reasons:
                self.reasons[kind] = why_refused(kind)
        if kinds and all(self.reasons[kind] for kind in kinds):
            raise NotImplementedError(
                f'{kinds[0].__name__}: attn_implementation="attnlib" is refused, since '
                f'{self.reasons[kinds[0]]}; use "eager", or select it only for parts of a model, such as '
                f'attn_implementation={{"text_config": "attnlib"}}'
            )

    def _reasons_against_trees(self, kinds: list[type[PreTrainedModel]]) -> list[str | None]:
        """Return why each of these model classes cannot compute a tree; its source is read once."""
        for kind in kinds:
            if kind not in self.without_trees:
                self.without_trees[kind] = trees.why_refused(kind)
        return [self.without_trees[kind] for kind in kinds]

    def _hiding_nothing(self, config: Any, named: dict[str, Any], meaning: str) -> HandedMask | None:
        """Return a mask without padding: None, if it can only mean ``meaning`` (such as "causal") here.

        None is ambiguous if it was returned before for the same lengths with another meaning. For a causal
        mask, it is also ambiguous if the model may have attention that is not causal, such as
        cross-attention, which gets None without a request. In these cases, return a mask in which every key
        is visible, and which records ``meaning``.
        """
        sizes, asked = (named["q_length"], named["kv_length"]), of_config(config, self.answers, OrderedDict)
        if named["q_length"] == 1 and meaning == "window":
            meaning = "causal"  # no key is before the window, or there would be a mask
        is_clear = named["q_length"] == 1 or meaning == "full" or self._are_all_causal(config)
        if is_clear and (asked.setdefault(sizes, meaning) == meaning or named["q_length"] == 1):
            asked.move_to_end(sizes)
            if len(asked) > MAX_LENGTHS:
                asked.popitem(last=False)
            return None
        return _whole(named)

    def _are_all_causal(self, config: Any) -> bool:
        """True if all layers with a config are causal, by their flags, or by source if no flags are known."""
        if flags := of_config(config, self.flags, set):
            return flags == {True}
        kind = type(config)
        if kind not in self.causal:
            self.causal[kind] = all_say_causal(kind)
        return self.causal[kind]

    def _flags(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        attention_mask: Tensor | None,
        given: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the flags (causal, window) for which a mask was made, if the module's own flags differ.

        Raises:
            NotImplementedError: the mask was made for other keys, was changed, or cannot be expressed by
                flags.
        """
        by_flags = attention.flags_of(module, given.get("is_causal"), given.get("sliding_window"))
        queries, keys = query.shape[2], key.shape[2]
        if isinstance(attention_mask, HandedMask):
            if attention_mask.is_changed or attention_mask.keys not in (None, keys):
                raise _other_keys(module, keys, {attention_mask.keys})
            meaning = attention_mask.meaning or by_flags
        elif attention_mask is None and given.get("cu_seq_lens_q") is None:
            meaning = self._meaning_of_none(module, (queries, keys), by_flags)
        else:
            return {}
        if by_flags == meaning or (queries == 1 and meaning not in ("full", "causal")):
            return {}
        if meaning in ("full", "causal"):
            return {"is_causal": meaning == "causal", "sliding_window": None}
        raise NotImplementedError(
            f'{type(module).__name__}: expected flags for a mask of type "{meaning}", as requested from '
            f'transformers, got flags for type "{by_flags}"; use "eager" for this model'
        )

    def _meaning_of_none(self, module: nn.Module, sizes: tuple[int, int], by_flags: str) -> str:
        """Return the mask, such as "causal", that None stands for in a call with these lengths.

        It is "full" if no mask was requested and the module's flags agree.
        """
        config = getattr(module, "config", None)
        asked = {} if config is None else of_config(config, self.answers, OrderedDict)
        if sizes in asked or by_flags == "full":
            return asked.get(sizes, "full")
        if getattr(module, "is_kv_shared_layer", False):  # Gemma 4 may compute only the last queries there
            longer = [meaning for (queries, keys), meaning in asked.items() if keys == sizes[1]]
            if longer:
                return longer[-1]
        if not asked and sizes[0] == 1:
            return "full"
        if asked:
            raise _other_keys(module, sizes[1], {keys for queries, keys in asked if queries == sizes[0]})
        raise NotImplementedError(
            f"{type(module).__name__}: expected a mask, or is_causal=False, got attention_mask=None and "
            'is_causal=True, which "eager" treats as full attention and others as causal; make the mask with '
            "a function of transformers.masking_utils, such as create_causal_mask"
        )


def of_config(config: Any, kept: "OfConfigs[Value]", make: Callable[[], Value]) -> Value:
    """Return the value stored for a config; it is made on first use and deleted with the config."""
    at = id(config)
    if at not in kept or kept[at][0]() is not config:
        kept[at] = ref(config, lambda _: kept.pop(at, None)), make()
    return kept[at][1]


def _whole(named: dict[str, Any]) -> HandedMask:
    """Return a mask in which every key is visible."""
    offset, length = named.get("kv_offset", 0), named["kv_length"]
    whole = torch.ones(named["batch_size"], length, dtype=torch.bool, device=named.get("device"))
    return handed(nn.functional.pad(whole, (offset, 0)), is_whole=True)


def _other_keys(module: nn.Module, keys: int, asked: set[int | None]) -> NotImplementedError:
    return NotImplementedError(
        f'{type(module).__name__}: expected as many keys as the mask of attn_implementation="attnlib" was '
        f"made for ({sorted(x for x in asked if x is not None)}), got {keys}; the model adds keys or changes "
        'its mask after it was made: use "eager" for this model'
    )


def should_have_called(model: nn.Module) -> bool:
    """True if a model has attention that should have called attnlib; False for compiled models."""
    modules = list(model.modules())
    is_compiled = any(
        "forward" in vars(x) or hasattr(x, "_orig_mod") or x._compiled_call_impl for x in modules
    )
    has_attention = any("attention" in type(x).__name__.lower() for x in modules)
    asks = any(getattr(getattr(x, "config", None), "_attn_implementation", None) == NAME for x in modules)
    return (
        has_attention
        and asks
        and not is_compiled
        and not any(isinstance(x, ReplacedAttention) for x in modules)
    )


def registered_functions() -> RegisteredFunctions | None:
    """Return attnlib's functions, or None if they are not registered with transformers."""
    owner = getattr(AttentionInterface().get(NAME), "__self__", None)
    return owner if isinstance(owner, RegisteredFunctions) else None


def begin(model: PreTrainedModel, args: tuple[Any, ...]) -> None:
    """Call ``begin`` of the registered functions; a method as hook would prevent copying the model."""
    if not torch.compiler.is_compiling() and (ours := registered_functions()) is not None:
        ours.begin(model)


def end(model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
    """Call ``end`` of the registered functions after a model's forward, even if the forward raised."""
    if not torch.compiler.is_compiling() and (ours := registered_functions()) is not None:
        ours.end(model, output)


def register_functions() -> None:
    """Register attnlib's attention and masks with transformers, and watch which models select them."""
    if registered_functions() is not None:
        return
    ours = RegisteredFunctions()
    AttentionInterface.register(NAME, ours.attend)
    AttentionMaskInterface.register(NAME, ours.mask)
    watch_choices(NAME, chosen)


def spare_masks(model: nn.Module) -> None:
    """Make no mask ``[b, 1, s, t]`` for replaced layers that choose their keys, if a smaller one will do."""
    ours = registered_functions()
    for module in model.modules():
        if ours is not None and isinstance(module, SPARED):
            of_config(module.config, ours.choosing, set).add("layers")


def chosen(model: PreTrainedModel) -> None:
    """Validate a model that has selected attnlib, and watch its first forward."""
    if (ours := registered_functions()) is not None:
        ours.expect(model)
