"""Calibrations of a checkpoint's layers over text, one layer after another, so that no model is ever in memory whole.

transformers makes the model without memory for its weights, and says once what it would give each layer besides hidden
states: masks, positions, angles. Then one layer at a time gets its weights, moves all hidden states on, and loses them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..calibration import Calibration, calibrate
from ..checkpoint.errors import CheckpointError
from ..checkpoint.folder import StoredTensor
from ..checkpoint.model import Model
from ..checkpoint.source_rope import rope_of
from ..stock import quiet, read_config, stock


class TextCalibration:
    """Gives the calibration of layer ``index`` of ``model`` over ``tokens`` ``[samples, length]``, in fp32.

    Layers are run in order: one that is asked for behind the last costs a start from the first. Keeps the hidden states
    of all tokens and the last layer, ``4 * m`` bytes a token and four a weight, on ``device``. Calibrations are on the
    CPU.

    Raises:
        CheckpointError: a weight that the layers need is missing, of another size or not finite, or a token has no
            embedding.
    """

    def __init__(self, model: Model, tokens: Tensor, device: torch.device | str = "cpu"):
        self.model, self.device = model, device
        self.tokens = tokens
        self._calibrations: Iterator[Calibration] | None = None
        self._index, self._last = -1, None
        self._loaded: nn.Module | None = None  # the layer that has its weights

    def __call__(self, index: int) -> Calibration:
        if self._last is None or index < self._index:
            self._calibrations = None
            self._unload()
            self._calibrations, self._index = self._start(), -1
        try:
            while self._index < index:
                self._last = next(self._calibrations).to("cpu")
                self._index += 1
        except BaseException as error:
            self._last = None
            self._unload()
            if isinstance(error, ValueError) and not isinstance(error, CheckpointError):
                raise CheckpointError(f"layer {self._index + 1}, over text: {error}") from error
            raise
        return self._last

    def _start(self) -> Iterator[Calibration]:
        if rope_of(self.model.config) is None:
            raise CheckpointError("config.json: expected a model with rope to be run over text, got one without")
        base = _without_weights(self.model)
        prefix = self.model.layers[0].prefix.partition("layers.")[0]
        rows = self._stored(f"{prefix}embed_tokens.weight").load()
        if self.tokens.max() >= len(rows):
            raise CheckpointError(
                f"tokenizer.json: expected tokens below {len(rows)}, of which the model has embeddings, "
                f"got {int(self.tokens.max())}"
            )
        scale = self.model.shape.width**0.5 if self.model.family.scales_embedding else 1.0
        states = [(rows[sample][None].float() * scale).to(self.device) for sample in self.tokens]
        base.rotary_emb.to(self.device)
        return calibrate(self._blocks(base, _beside(base, states[0])), states)

    def _blocks(self, base: nn.Module, beside: list[dict]) -> Iterator[tuple]:
        for index, (layer, arguments) in enumerate(zip(base.layers, beside, strict=True)):
            prefix = self.model.layers[index].prefix.removesuffix("self_attn.")
            weights = {
                name: self._stored(prefix + name, tuple(wanted.shape)).load().to(self.device).float()
                for name, wanted in layer.state_dict().items()
            }
            layer.load_state_dict(weights, assign=True)
            del weights
            self._loaded = layer
            # What q_proj reads, or what it is fused into, is what its layer reads.
            first = layer.self_attn.get_submodule(self.model.family.weights[0][0])
            yield lambda x, layer=layer, arguments=arguments: layer(x, **arguments), first
            self._unload()  # before the next comes; not in a finally, which may run when the interpreter ends

    def _unload(self) -> None:
        if self._loaded is not None:
            self._loaded.to("meta")
            self._loaded = None

    def _stored(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        stored = self.model.checkpoint.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{name}: expected, to run the model over text, and it is missing")
        if shape is not None and stored.entry.shape != shape:
            raise CheckpointError(
                f"{name}: expected {list(shape)}, as transformers reads config.json, got {list(stored.entry.shape)}"
            )
        return stored


def _without_weights(model: Model) -> nn.Module:
    """The model without its head, as transformers makes it, on the meta device; only angles can be computed."""
    transformers = stock()
    with quiet():
        config = read_config(model.checkpoint.folder).get_text_config()
        with torch.device("meta"):
            base = transformers.AutoModel.from_config(config, trust_remote_code=False, dtype=torch.float32)
        base.rotary_emb = type(base.rotary_emb)(config)
    base.norm = nn.Identity()
    return base.eval()


def _beside(base: nn.Module, states: Tensor) -> list[dict]:
    """What ``base`` gives each layer besides hidden states like these ``[1, length, m]``."""
    layers, recorders = base.layers, [_Recorder() for _ in base.layers]
    base.layers = nn.ModuleList(recorders)
    with torch.no_grad():
        base(inputs_embeds=states, use_cache=False)
    base.layers = layers
    return [recorder.arguments for recorder in recorders]


class _Recorder(nn.Module):
    """A layer that does nothing but remember its arguments."""

    def forward(self, hidden_states: Tensor, **arguments) -> Tensor:
        self.arguments = arguments
        return hidden_states
