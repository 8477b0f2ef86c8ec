"""Compute logits from a language model's final hidden states, for one slice of the vocabulary at a time.

The transformers class runs its own forward, so each family's logit multipliers and soft caps apply. Only its
decoder is replaced, by a stub that returns the given hidden states.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...checkpoint_files.folder import Checkpoint, StoredTensor
from ..checkpoint.errors import CheckpointError
from ..stock import class_of, quiet, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEADS = ("lm_head", "embed_out")
EMBEDDINGS = ("embed_tokens", "embed_in", "wte")
Rows = Callable[[int, int], Tensor]


class Head:
    """The head of ``model``, whose decoder is replaced by a stub; ``rows`` loads rows of each head parameter.

    Logits are computed for one slice of the vocabulary at a time. Therefore, operations after the matrix
    product must treat all tokens alike, as they do in every known family.
    """

    def __init__(self, model: "PreTrainedModel", rows: Mapping[str, Rows]):
        self._head, self._rows = model.get_output_embeddings(), rows
        self.words: int = self._head.out_features
        setattr(model, model.base_model_prefix, _StubDecoder())
        self._model = model.eval()

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, device: torch.device | str) -> "Head | None":
        """Return a checkpoint's head in fp32, which reads its rows on demand; None if the model has no head.

        Raises:
            CheckpointError: the head's weight or bias is missing or has the wrong size.
        """
        with quiet(), torch.device("meta"):
            config = read_config(checkpoint)
            model = class_of(config)(config)
        head = model.get_output_embeddings()
        if head is None:
            return None
        rows = {}
        for name, wanted in head.named_parameters():
            stored = _stored(checkpoint, name)
            if stored.entry.shape != tuple(wanted.shape):
                raise CheckpointError(
                    f"lm_head.{name}: expected {list(wanted.shape)}, as transformers reads config.json, "
                    f"got {list(stored.entry.shape)}"
                )
            rows[name] = partial(_in_fp32, stored, device)
        return cls(model, rows)

    @classmethod
    def of_model(cls, model: "PreTrainedModel") -> "Head":
        """Return the head of a loaded model, and remove the decoder from that model."""
        whole = {name: x.detach().clone() for name, x in model.get_output_embeddings().named_parameters()}
        return cls(model, {name: lambda first, last, x=x: x[first:last] for name, x in whole.items()})

    def take(self, first: int, last: int) -> None:
        """Load the head's weights for tokens ``[first, last)``; calls then return only their logits."""
        for name, rows in self._rows.items():
            setattr(self._head, name, None)  # free the old rows before new ones are allocated
            setattr(self._head, name, nn.Parameter(rows(first, last), requires_grad=False))

    def __call__(self, states: Tensor) -> Tensor:
        """Return the logits of the loaded tokens, ``[n, words]``, for final hidden states ``[n, m]``."""
        with torch.no_grad():
            return self._model(inputs_embeds=states[None], use_cache=False).logits[0]


def _in_fp32(stored: StoredTensor, device: torch.device | str, first: int, last: int) -> Tensor:
    """Copy rows of a stored tensor to ``device`` in their stored dtype, and return them in fp32."""
    return stored.rows(first, last).to(device).to(torch.float32, copy=True)


class _StubDecoder(nn.Module):
    """A stub that replaces a decoder: it returns the given embeddings as the final hidden states."""

    @property
    def decoder(self) -> "_StubDecoder":  # OPT calls its decoder through this attribute
        return self

    def forward(self, input_ids: None = None, *, inputs_embeds: Tensor, **_: object) -> "_StubOutput":
        return _StubOutput(inputs_embeds)


class _StubOutput:
    """The output of a stub decoder: it has hidden states, and all other attributes are None."""

    def __init__(self, states: Tensor):
        self.last_hidden_state: Tensor = states

    def __getitem__(self, _: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


def _stored(checkpoint: Checkpoint, parameter: str) -> StoredTensor:
    """Return the stored tensor of a head parameter; if a head has no weight, use the embedding's."""
    for modules in (HEADS, EMBEDDINGS) if parameter == "weight" else (HEADS,):
        ends = tuple(f"{module}.{parameter}" for module in modules)
        found = [
            name for name in checkpoint.tensors if name in ends or name.endswith(tuple(f".{x}" for x in ends))
        ]
        if len(found) == 1:
            return checkpoint.tensors[found[0]]
    raise CheckpointError(
        f"lm_head.{parameter}: expected a head, or one embedding that it is tied to, got neither"
    )
