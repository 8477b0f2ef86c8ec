"""A checkpoint's decoder one layer at a time, so that no model is ever in memory whole.

transformers makes the model without memory for its weights, and says once what it would give each layer besides hidden
states: masks, positions, angles. Then one layer at a time gets its weights, moves hidden states on, and loses them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..checkpoint.errors import CheckpointError
from ..checkpoint.folder import Checkpoint, StoredTensor
from ..stock import body_class_of, quiet, read_config
from .experts import Parts, parts_of

EMBEDDING = "embed_tokens.weight"


class Layers:
    """The decoder layers of a checkpoint's text model, in fp32 on ``device``.

    Raises:
        CheckpointError: the model is of a kind that cannot be run so, or a weight is missing or of another size.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str = "cpu"):
        self.checkpoint: Checkpoint = checkpoint
        self.device: torch.device | str = device
        self.prefix: str = _prefix(checkpoint)
        self._base = _without_weights(checkpoint)
        self._base.rotary_emb.to(device)
        self._arguments: list[dict[str, object]] = []
        self.norm: nn.Module = self._base.norm
        for index, layer in enumerate(self._base.layers):
            self._stored(layer, f"{self.prefix}layers.{index}.")

    def __len__(self) -> int:
        return len(self._base.layers)

    def embedded(self, tokens: Tensor) -> list[Tensor]:
        """The hidden states before the first layer of ``tokens`` ``[samples, length]``: ``[1, length, m]`` each.

        Raises:
            CheckpointError: a token has no embedding.
        """
        stored = self._entry(f"{self.prefix}{EMBEDDING}")
        words = stored.entry.shape[0]
        if tokens.max() >= words:
            raise CheckpointError(
                f"tokenizer.json: expected tokens below {words}, of which the model has embeddings, "
                f"got {int(tokens.max())}"
            )
        used, places = tokens.unique(return_inverse=True)
        self._embed_by(_rows(stored, used).to(self.device, torch.float32, copy=True))
        layers, recorders = self._base.layers, [_Recorder() for _ in self._base.layers]
        self._base.layers, self._base.norm = nn.ModuleList(recorders), nn.Identity()
        with torch.no_grad():
            states = [self._base(sample[None].to(self.device), use_cache=False)[0].clone() for sample in places]
        self._base.layers = layers
        self._base.embed_tokens.to("meta")
        self._arguments = [recorder.arguments for recorder in recorders]
        return states

    def _embed_by(self, rows: Tensor) -> None:
        """Take these rows for the embedding; what else it has, transformers makes of the config."""
        embedding = self._base.embed_tokens
        embedding.padding_idx = None
        for name, buffer in [*embedding.named_buffers()]:
            embedding.register_buffer(name, torch.empty_like(buffer, device=self.device), persistent=False)
        embedding.weight = nn.Parameter(rows[:0])
        self._base._init_weights(embedding)
        embedding.weight = nn.Parameter(rows, requires_grad=False)

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """A layer, which has its weights until the block ends. It is called with what :meth:`embedded` saw it get."""
        layer = self._base.layers[index]
        try:
            self.load(layer, f"{self.prefix}layers.{index}.")
            yield _With(layer, self._arguments[index])
        finally:
            layer.to("meta")

    def load(self, module: nn.Module, prefix: str) -> None:
        """Give a module the weights of the checkpoint that begin with ``prefix``.

        Raises:
            CheckpointError: one is missing or of another size.
        """
        for name, parts in self._stored(module, prefix).items():
            # Memory of its own: where factors begin decides how their product is rounded.
            weight = torch.empty_like(module.get_parameter(name), dtype=torch.float32, device=self.device)
            stacked = weight.dim() > len(self._entry(parts[0][0]).entry.shape)
            for row, names in zip(weight if stacked else [weight], parts, strict=True):
                start = 0
                for part in map(self.tensor, names):  # a GPU gets it as it is stored, and makes fp32 of it itself
                    row[start : (start := start + len(part))] = part.to(self.device)
            module.load_state_dict({name: weight}, assign=True, strict=False)

    def tensor(self, name: str) -> Tensor:
        """A tensor of the checkpoint, as it is stored."""
        return self._entry(name).load()

    def _stored(self, module: nn.Module, prefix: str) -> dict[str, Parts]:
        """The names in the file of what each weight of a module is made of."""
        found = {}
        for name, wanted in module.state_dict().items():
            parts = parts_of(prefix + name, self.checkpoint.tensors)
            found[name] = ((prefix + name,),) if parts is None else parts
            shapes = [[self._entry(part).entry.shape for part in row] for row in found[name]]
            got = _shape(shapes, stacked=wanted.dim() > len(shapes[0][0]))
            if got != tuple(wanted.shape):
                raise CheckpointError(
                    f"{found[name][0][0]}: expected {name} {list(wanted.shape)}, as transformers reads config.json, "
                    f"got {list(got)}"
                )
        return found

    def _entry(self, name: str) -> StoredTensor:
        stored = self.checkpoint.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{name}: expected, to run the model over text, and it is missing")
        return stored


class _With(nn.Module):
    """A layer with the arguments that are the same for all samples."""

    def __init__(self, layer: nn.Module, arguments: dict[str, object]):
        super().__init__()
        self.layer, self.arguments = layer, arguments

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.layer(hidden_states, **self.arguments)


class _Recorder(nn.Module):
    """A layer that does nothing but remember its arguments."""

    def forward(self, hidden_states: Tensor, **arguments) -> Tensor:
        self.arguments = arguments
        return hidden_states


def _shape(shapes: list[list[tuple[int, ...]]], *, stacked: bool) -> tuple[int, ...]:
    """That of tensors of these shapes, each row joined and, if asked for, rows stacked; () if they do not fit."""
    rows = {(sum(shape[0] for shape in row), *row[0][1:]) for row in shapes}
    tails = {shape[1:] for row in shapes for shape in row}
    if len(rows) != 1 or len(tails) != 1:
        return ()
    return ((len(shapes),) if stacked else ()) + rows.pop()


def _rows(stored: StoredTensor, used: Tensor) -> Tensor:
    """Rows of a tensor by their indices, which rise; neighbours are read together, and no others."""
    ends = (used.diff() > 1).nonzero().flatten() + 1
    return torch.cat([stored.rows(int(run[0]), int(run[-1]) + 1) for run in used.tensor_split(ends.tolist())])


def _prefix(checkpoint: Checkpoint) -> str:
    """What precedes the names of a decoder's layers."""
    places = [name.removesuffix(EMBEDDING) for name in checkpoint.tensors if name.endswith(EMBEDDING)]
    found = [place for place in places if any(name.startswith(f"{place}layers.0.") for name in checkpoint.tensors)]
    if len(found) != 1:
        wanted = "expected in one place beside layers, to run the model over text"
        raise CheckpointError(f"{EMBEDDING}: {wanted}, got {len(found)} such places")
    return found[0]


def _without_weights(checkpoint: Checkpoint) -> nn.Module:
    """The model without its head, as transformers makes it, on the meta device; only angles can be computed."""
    with quiet():
        config = read_config(checkpoint.folder).get_text_config()
        with torch.device("meta"):
            base = body_class_of(config)._from_config(config, dtype=torch.float32)
    if not all(hasattr(base, name) for name in ("layers", "embed_tokens", "norm", "rotary_emb")):
        kind = str(config.model_type)[:80]
        raise CheckpointError(f"config.json: model_type: expected one with rope to be run over text, got {kind!r}")
    if [*base.rotary_emb.buffers()]:  # and no module of ours, which computes all
        base.rotary_emb = type(base.rotary_emb)(config)
    return base.eval()
