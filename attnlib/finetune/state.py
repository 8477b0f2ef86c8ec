"""Save and load the state of a training run: one safetensors file, which is always complete or absent.

Weights, optimizer and the curve so far share one file, so they always belong to the same step; nothing is
pickled. Sharded tensors are gathered and stored whole, so a run can resume with another number of ranks.
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from ..convert.checkpoint.errors import CheckpointError
from ..convert.checkpoint.writing import sync_folder
from ..internal.files import write_tensors
from .ranks import WorkerGroup, parted, whole

Curve = list[tuple[float, ...]]  # (steps taken, bits per held-out token), and with index branches the recall


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a model by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def save_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, curve: Curve, ranks: WorkerGroup
) -> None:
    """Save the training state to ``path`` atomically; all ranks must call this, but only the first writes."""
    tensors = {}
    for name, parameter in trained(model).items():
        found = {f"model.{name}": parameter.detach()}
        found |= {
            f"optimizer.{name}/{key}": value for key, value in optimizer.state.get(parameter, {}).items()
        }
        for key, value in found.items():
            value = whole(value)
            if ranks.is_first:
                tensors[key] = value.cpu().contiguous()
    if ranks.is_first:
        write_tensors(path, tensors, {"curve": json.dumps(curve)})
        sync_folder(path.parent)


def load_weights(path: Path, model: nn.Module) -> None:
    """Copy the weights in the state at ``path`` into the trainable parameters of a model, in place.

    Raises:
        CheckpointError: the state belongs to another model.
    """
    stored, _ = _read(path)
    _check(path, stored, model)
    with torch.no_grad():
        for name, parameter in trained(model).items():
            parameter.copy_(parted(stored[f"model.{name}"], parameter))


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Curve:
    """Load the state at ``path`` into model and optimizer, in place, and return the curve so far.

    Raises:
        CheckpointError: the state belongs to another model.
    """
    load_weights(path, model)
    stored, curve = _read(path)
    names = {parameter: name for name, parameter in trained(model).items()}
    states = {}
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for index, parameter in enumerate(parameters):
        prefix = f"optimizer.{names[parameter]}/"
        values = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
        if values:
            states[index] = {key: parted(x, parameter) if x.ndim else x for key, x in values.items()}
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    return curve


def _read(path: Path) -> tuple[dict[str, Tensor], Curve]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            curve = [tuple(point) for point in json.loads((file.metadata() or {}).get("curve", "[]"))]
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path}: expected the state of a training run, got {error}; delete the file"
        ) from None
    return stored, curve


def _check(path: Path, stored: dict[str, Tensor], model: nn.Module) -> None:
    shapes = {f"model.{name}": parameter.shape for name, parameter in trained(model).items()}
    found = {name: value.shape for name, value in stored.items() if name.startswith("model.")}
    wrong = sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name))
    if wrong:
        raise CheckpointError(
            f"{path}: expected the state of this model, got other tensors {wrong[:3]}; delete the file"
        )
