"""Triton's interpreter without work that changes nothing, in a third of the time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from triton import language as tl
from triton.runtime import interpreter


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Leave out what every device function and operation does again, or for nothing.

    - The language is patched once, not at every launch and call of a device function.
    - Sums of integers are not done again in 64 bits: of an overflow that finds, ``debug=False`` tells nobody.
    - The NumPy dtype of a tensor is looked up in one table, not in one made for each look-up.
    """
    builder, numpy_dtype, known = interpreter.interpreter_builder, interpreter._get_np_dtype, {}
    assert not builder.options.debug

    def known_dtype(dtype):
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = numpy_dtype(scalar)
        return known[scalar.name]

    patched = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
        patch.setattr(interpreter, "_get_np_dtype", known_dtype)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield
    patched.restore()
