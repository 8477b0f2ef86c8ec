"""Names of before 0.1 raise errors that name the new ones; ``dir(attnlib)`` shows public names only."""

import importlib
import subprocess
import sys

import pytest
import torch

import attnlib
from attnlib import KVLayout

MOVED = {
    "attnlib": {
        "FIRST_QUERY": "QUERY_OFFSET",
        "Handle": "SequenceHandle",
        "Llama3": "scaling.Llama3Scaling",
        "NTK": "scaling.NTKScaling",
        "SAVE_OPS": "CHECKPOINT_SAVE_OPS",
        "Temperature": "QueryTemperature",
        "load": "load_pretrained",
    },
    "attnlib.masks": {"used": "seqused"},
    "attnlib.scaling": {"YaRN": "YaRNScaling"},
}


@pytest.mark.parametrize(
    ("module", "old", "new"), [(module, *x) for module, names in MOVED.items() for x in names.items()]
)
def test_an_old_name_raises_and_names_the_new_one(module, old, new):
    message = f"{module}.{old} has been renamed: use {module}.{new}"
    for statement in (f"import {module}; {module}.{old}", f"from {module} import {old}"):
        with pytest.raises(ImportError) as caught:
            exec(statement, {})
        assert str(caught.value) == message
    x = importlib.import_module("attnlib")
    for name in f"{module}.{new}".split(".")[1:]:
        x = getattr(x, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'attnlib' has no attribute 'nothing'"):
        _ = attnlib.nothing
    assert not hasattr(attnlib.masks, "nothing")


def test_old_fields_name_the_new_ones():
    layout = KVLayout.latent(8, 4, window=5, first_tokens=1, storage_dtype=torch.int8)
    for old, new in (("store", "storage_dtype"), ("tail", "rope_dim"), ("keep_first", "first_tokens")):
        with pytest.raises(AttributeError, match=f"KVLayout.{old} has been renamed: use KVLayout.{new}"):
            getattr(layout, old)
    assert (layout.storage_dtype, layout.rope_dim, layout.first_tokens) == (torch.int8, 4, 1)
    with pytest.raises(AttributeError, match="'KVLayout' object has no attribute 'nothing'"):
        _ = layout.nothing


def test_the_old_name_of_the_generic_backend_names_the_new_one():
    q = torch.randn(1, 2, 1, 8)
    with pytest.raises(ValueError, match="'triton:generic'"):
        attnlib.attention(q, q, q, mask=attnlib.CAUSAL, backend="triton:plain")


def test_dir_shows_public_names_and_modules_load_when_touched():
    code = (
        "import sys, attnlib\n"
        "lazy = {'compat', 'convert', 'parallel', 'sizes'}\n"
        "assert lazy <= {*dir(attnlib)}, dir(attnlib)\n"
        "assert not [name for name in lazy if f'attnlib.{name}' in sys.modules]\n"
        "assert not [name for name in dir(attnlib) if name.startswith('_')]\n"
        "for name in dir(attnlib): getattr(attnlib, name)\n"
        "assert all(f'attnlib.{name}' in sys.modules for name in lazy)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
