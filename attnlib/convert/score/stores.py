"""The forms in which a cache stores keys and values, by the names of the command line."""

from types import MappingProxyType
from typing import NamedTuple

import torch

from ...checkpoint_files.folder import Checkpoint

PLAIN = MappingProxyType({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16})
SMALL = MappingProxyType({"int8": torch.int8, "fp8": torch.float8_e4m3fn})
NAMES = (*PLAIN, *SMALL)


class Store(NamedTuple):
    """A cache's dtypes: ``dtype`` as computed by the model, and ``storage_dtype`` as in ``KVLayout``."""

    name: str
    dtype: torch.dtype
    storage_dtype: torch.dtype | None

    @classmethod
    def of(cls, name: str, dtype: torch.dtype) -> "Store":
        """Return a store by its name, for a model with weights of ``dtype``.

        Caches of int8 and fp8 store rotary keys, and compute, in the model's 16-bit dtype.
        """
        if name in PLAIN:
            return cls(name, PLAIN[name], None)
        return cls(name, PLAIN[usual(dtype)], SMALL[name])


def usual(dtype: torch.dtype) -> str:
    """Return the name of the 16-bit store of a model whose weights have ``dtype``: bf16, except for fp16."""
    return "fp16" if dtype == torch.float16 else "bf16"


def weights_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of a checkpoint's first floating weight, or bf16 if that has only one byte."""
    floats = (x.entry.dtype for x in checkpoint.tensors.values() if x.entry.dtype.is_floating_point)
    dtype = next(floats, torch.bfloat16)
    return dtype if dtype.itemsize > 1 else torch.bfloat16
