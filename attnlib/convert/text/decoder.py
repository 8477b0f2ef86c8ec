"""Build a checkpoint's decoder without weights, and find the attribute names of its parts."""

from typing import NamedTuple

import torch
from torch import nn

from ...checkpoint_files.folder import Checkpoint
from ..checkpoint.errors import CheckpointError
from ..stock import body_class_of, quiet, read_config


class Names(NamedTuple):
    """The attribute names under which a decoder has its embedding, its layers and its final norm."""

    embedding: str
    layers: str
    norm: str


KNOWN = (
    Names("embed_tokens", "layers", "norm"),
    Names("embed_tokens", "layers", "final_layer_norm"),
    Names("embed_tokens", "layers", "final_layernorm"),
    Names("embed_tokens", "layers", "embedding_norm"),
    Names("embed_in", "layers", "final_layer_norm"),
    Names("wte", "h", "ln_f"),
)

ROPES = ("rotary_emb", "pos_emb")  # names of the module that computes rotary angles


def without_weights(checkpoint: Checkpoint) -> nn.Module:
    """Return the model without its head, built by transformers on the meta device.

    Only the rope module, which computes the angles, is on a real device.
    """
    with quiet():
        config = read_config(checkpoint).get_text_config()
        with torch.device("meta"):
            base = body_class_of(config)._from_config(config, dtype=torch.float32)
    base = getattr(base, "decoder", base)  # OPT wraps its decoder in another module
    # Buffers on the meta device have no values. attnlib's own rope module has no buffers.
    for name in ROPES:
        rope = getattr(base, name, None)
        if rope is not None and [*rope.buffers()]:
            setattr(base, name, type(rope)(config))
    return base.eval()


def names_of(decoder: nn.Module) -> Names:
    """Return the attribute names of the embedding, the layers and the final norm of a decoder.

    Raises:
        CheckpointError: the names are unknown, or another module follows the norm, as in OPT 350M.
    """
    children = dict(decoder.named_children())
    for names in KNOWN:
        if all(name in children for name in names) and "project_out" not in children:
            return names
    raise CheckpointError(
        "config.json: model_type: expected a decoder with an embedding, layers and a norm, to run it over "
        f"text, got {str(decoder.config.model_type)[:80]!r}"
    )


def prefix_of(checkpoint: Checkpoint, names: Names) -> str:
    """Return the prefix of the decoder's tensor names."""
    embedding, first = f"{names.embedding}.weight", f"{names.layers}.0."
    places = [name.removesuffix(embedding) for name in checkpoint.tensors if name.endswith(embedding)]
    found = [
        place for place in places if any(name.startswith(f"{place}{first}") for name in checkpoint.tensors)
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"{embedding}: expected once, next to the layers, to run the model over text, got "
            f"{len(found)} of them"
        )
    return found[0]
