"""A checkpoint's decoder as transformers makes it, without weights, and what it calls its parts."""

from typing import NamedTuple

import torch
from torch import nn

from ...checkpoint_files.folder import Checkpoint
from ..checkpoint.errors import CheckpointError
from ..stock import body_class_of, quiet, read_config


class Names(NamedTuple):
    """What a decoder calls its parts."""

    embedding: str
    layers: str
    norm: str


KNOWN = (
    Names("embed_tokens", "layers", "norm"),
    Names("embed_tokens", "layers", "final_layer_norm"),
    Names("embed_in", "layers", "final_layer_norm"),
    Names("wte", "h", "ln_f"),
)


def without_weights(checkpoint: Checkpoint) -> nn.Module:
    """The decoder without its head, as transformers makes it, on the meta device; only angles can be
    computed.
    """
    with quiet():
        config = read_config(checkpoint).get_text_config()
        with torch.device("meta"):
            base = body_class_of(config)._from_config(config, dtype=torch.float32)
    base = getattr(base, "decoder", base)  # of OPT
    if hasattr(base, "rotary_emb") and [
        *base.rotary_emb.buffers()
    ]:  # and no module of ours, which computes all
        base.rotary_emb = type(base.rotary_emb)(config)
    return base.eval()


def names_of(decoder: nn.Module) -> Names:
    """What this one calls its parts.

    Raises:
        CheckpointError: it has others, or does something behind its norm, as the OPT of 350M does.
    """
    children = dict(decoder.named_children())
    for names in KNOWN:
        if all(name in children for name in names) and "project_out" not in children:
            return names
    kind = str(decoder.config.model_type)[:80]
    wanted = "expected a decoder of an embedding, layers and a norm, to be run over text"
    raise CheckpointError(f"config.json: model_type: {wanted}, got {kind!r}")


def prefix_of(checkpoint: Checkpoint, names: Names) -> str:
    """What precedes the names of a decoder's layers."""
    embedding, first = f"{names.embedding}.weight", f"{names.layers}.0."
    places = [name.removesuffix(embedding) for name in checkpoint.tensors if name.endswith(embedding)]
    found = [
        place for place in places if any(name.startswith(f"{place}{first}") for name in checkpoint.tensors)
    ]
    if len(found) != 1:
        wanted = "expected in one place beside layers, to run the model over text"
        raise CheckpointError(f"{embedding}: {wanted}, got {len(found)} such places")
    return found[0]
