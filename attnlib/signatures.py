"""What a function answers to arguments that it does not take: what it takes instead."""

import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from types import MappingProxyType
from typing import TypeVar

Function = TypeVar("Function", bound=Callable)
MASKS = "CAUSAL, FULL or sliding(n)"
# What other libraries call things, and how they are said here.
INSTEAD = MappingProxyType(
    {
        **dict.fromkeys(("is_causal", "causal"), "say mask=CAUSAL, or mask=FULL"),
        **dict.fromkeys(("window_size", "sliding_window", "window", "local_window_size"), "say mask=sliding(n)"),
        **dict.fromkeys(
            ("attn_mask", "attention_mask", "attn_bias", "bias"),
            "a bool one [b|1, h|1, s, t] is mask=attnlib.masks.mask_tensor(shown), one that is added to scores is "
            "score=attnlib.scores.bias_tensor(bias)",
        ),
        "key_padding_mask": "say key_starts= and key_ends=, as attnlib.packing.bounds_of(mask) finds them",
        "block_mask": "say mask=mask_mod(function, *tensors)",
        "score_mod": "say score=score_mod(function, *tensors)",
        **dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), "say scale="),
        **dict.fromkeys(("dropout", "attention_dropout", "dropout_prob"), "say dropout_p="),
        "enable_gqa": "leave it out: k says how many KV heads there are",
        "cu_seqlens": "say cu_seqlens_q= and cu_seqlens_k=",
        **dict.fromkeys(("return_lse", "return_softmax_lse"), "call the function whose name ends in _with_lse"),
        **dict.fromkeys(("need_weights", "output_attentions"), "there are none: no tile of them is kept"),
        **dict.fromkeys(("embed_dim", "d_model"), "it is hidden_size, which comes first"),
        **dict.fromkeys(("n_heads", "nhead", "heads"), "say num_heads="),
        **dict.fromkeys(("n_kv_heads", "kv_heads", "num_key_value_heads"), "say num_kv_heads="),
        **dict.fromkeys(("past_key_value", "past_key_values", "cache", "kv_cache"), "say kv= a layer of cache.step()"),
    }
)


def kind(function: Function) -> Function:
    """The same function, whose errors for arguments that it does not take, or misses, say what it does take."""
    return _answering(function, None)


def leading_to(instead: str) -> Callable[[Function], Function]:
    """The same for a constructor that is nobody's to call: its errors say what to call ``instead``."""
    return lambda function: _answering(function, instead)


def _answering(function: Function, instead: str | None) -> Function:
    name = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def called(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__.tb_next is not None:  # it comes from within
                raise
            why = str(error)
        raise TypeError(f"{name}: {instead or _said(function, why)}")

    return called


def _said(function: Callable, why: str) -> str:
    """What Python says of a call that does not fit, with a remedy."""
    why = why.partition("() ")[2] or why
    names = [x.name for x in signature(function).parameters.values() if x.name != "self"]
    if match := re.search(r"unexpected keyword argument '(\w+)'", why):
        unknown = match[1]
        near = get_close_matches(unknown, names, 1)
        remedy = INSTEAD.get(unknown) or (f"did you mean {near[0]}=" if near else f"it takes {', '.join(names)}")
        return f"{unknown}: no such argument; {remedy}"
    if re.search(r"missing .*'mask'", why):
        return f"mask: expected a Mask such as {MASKS}, got none; no mask is taken for granted"
    if re.search(r"takes .*positional arguments?", why):
        first = [x for x in signature(function).parameters.values() if x.kind is not Parameter.KEYWORD_ONLY]
        places = ", ".join(x.name for x in first if x.name != "self")
        return f"expected {places} by position and all else by name, as mask=CAUSAL; it {why}"
    return why
