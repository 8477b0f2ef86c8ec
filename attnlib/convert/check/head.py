"""A language model's head: logits of final hidden states, for some words of the vocabulary at a time.

The class of transformers runs its own forward, so that multipliers, soft caps and whatever else a family does
to its logits are done as there. Only its decoder is another: one that takes final hidden states and gives
them on.
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
    """The head of ``model``, whose decoder is taken away; ``rows`` gives some rows of each of its parameters.

    What comes after the product with its weight must be the same for every word, as it is in all families.
    """

    def __init__(self, model: "PreTrainedModel", rows: Mapping[str, Rows]):
        self._head, self._rows = model.get_output_embeddings(), rows
        self.words: int = self._head.out_features
        setattr(model, model.base_model_prefix, _Given())
        self._model = model.eval()

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, device: torch.device | str) -> "Head | None":
        """That of a folder, in fp32, whose rows are read when they are asked for; None: its model has none.

        Raises:
            CheckpointError: the file has no tensor for it, or one of another size.
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
        """That of a model in memory, which loses its decoder."""
        whole = {name: x.detach().clone() for name, x in model.get_output_embeddings().named_parameters()}
        return cls(model, {name: lambda first, last, x=x: x[first:last] for name, x in whole.items()})

    def take(self, first: int, last: int) -> None:
        """From now on give logits of the words ``first`` to ``last - 1``."""
        for name, rows in self._rows.items():
            setattr(self._head, name, None)  # before the next rows take their memory
            setattr(self._head, name, nn.Parameter(rows(first, last), requires_grad=False))

    def __call__(self, states: Tensor) -> Tensor:
        """Logits ``[n, words]`` of final hidden states ``[n, m]``."""
        with torch.no_grad():
            return self._model(inputs_embeds=states[None], use_cache=False).logits[0]


def _in_fp32(stored: StoredTensor, device: torch.device | str, first: int, last: int) -> Tensor:
    """Rows of a tensor, which travel as they are stored, in memory of their own."""
    return stored.rows(first, last).to(device).to(torch.float32, copy=True)


class _Given(nn.Module):
    """A decoder whose embeddings are its final hidden states."""

    @property
    def decoder(self) -> "_Given":  # where OPT has it
        return self

    def forward(self, input_ids: None = None, *, inputs_embeds: Tensor, **_: object) -> "_Output":
        return _Output(inputs_embeds)


class _Output:
    """What a decoder returns, of which there are hidden states alone."""

    def __init__(self, states: Tensor):
        self.last_hidden_state: Tensor = states

    def __getitem__(self, _: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


def _stored(checkpoint: Checkpoint, parameter: str) -> StoredTensor:
    """A parameter of the head in the file; without one of its own it is tied to the embedding."""
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
