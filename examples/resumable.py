"""Training that can stop anywhere and go on to the same weights: settings and states that are whole or absent.

Weights, optimizer and the curve so far are one safetensors file, written aside and renamed, so that they always belong
to the same step; nothing is pickled. On one device with one torch the result is the same bit for bit.
"""

import json
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

import torch
from decoder import Decoder
from safetensors import safe_open
from safetensors.torch import save
from text import Corpus
from torch import Tensor
from training import make_optimizer, optimise
from variants import Preset

from attnlib.convert.checkpoint.plain_json import dump, parse_object
from attnlib.convert.checkpoint.writing import write_file

SETTINGS = "settings.json"
Curve = list[tuple[int, float]]  # steps taken, bits per byte of held-out text


def claim(folder: Path, settings: Mapping[str, object]) -> None:
    """Begin a run with these settings in ``folder``, or go on with one that was begun with the same.

    Raises:
        ValueError: the folder's run has other settings, or settings that are no JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    if not path.exists():
        write_file(folder, SETTINGS, dump(settings))
    begun = parse_object(path.read_bytes(), str(path))
    for name in sorted({*begun, *settings}):
        expected, got = begun.get(name), settings.get(name)
        if expected != got:
            raise ValueError(
                f"{name}: expected {expected!r}, with which the run in {folder} was begun, got {got!r}; "
                "give the same options, another --out, or delete the folder"
            )


def fit(
    model: Decoder,
    corpus: Corpus,
    preset: Preset,
    loss_of: Callable[[Tensor, int], Tensor],
    score: Callable[[], float],
    *,
    path: Path,
    label: str,
    seed: int,
    every: int,
) -> Curve:
    """Train ``model`` in place for ``preset.steps``, from where the state at ``path`` stands.

    ``loss_of`` gets a batch and how many steps were taken before; it may freeze parameters, for the optimizer has all.
    Each ``every`` steps, and at the end, the model is scored and its state saved.
    """
    optimizer = make_optimizer(model)
    curve = load_state(path, model, optimizer) if path.exists() else []
    done = curve[-1][0] if curve else 0
    if not curve:
        curve.append((0, score()))
    if done == preset.steps:
        return curve
    batches = corpus.batches(count=preset.steps, batch=preset.batch, context=preset.context, seed=seed)
    options = {"steps": preset.steps, "rate": preset.learning_rate, "label": label, "done": done}
    for step, _ in enumerate(optimise(optimizer, loss_of, islice(batches, done, None), **options), done + 1):
        if step % every == 0 or step == preset.steps:
            curve.append((step, score()))
            save_state(path, model, optimizer, curve)
    return curve


def save_state(path: Path, model: Decoder, optimizer: torch.optim.Optimizer, curve: Curve) -> None:
    """Replace the state at ``path``, all of it or nothing."""
    names = [name for name, _ in model.named_parameters()]
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{names[index]}/{key}": value for key, value in values.items()}
    write_file(path.parent, path.name, save(tensors, {"curve": json.dumps(curve)}))


def load_state(path: Path, model: Decoder, optimizer: torch.optim.Optimizer) -> Curve:
    """Put the state at ``path`` into model and optimizer, in place; returns the curve so far.

    Raises:
        ValueError: it is the state of another model.
    """
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        curve = [tuple(point) for point in json.loads((file.metadata() or {}).get("curve", "[]"))]
    parameters = dict(model.named_parameters())
    shapes = {f"model.{name}": value.shape for name, value in parameters.items()}
    found = {name: value.shape for name, value in stored.items() if name.startswith("model.")}
    if not curve or found != shapes:
        wrong = sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name))
        raise ValueError(f"{path}: expected the state of this model, got another {wrong[:3]}; delete the file")
    states = {}
    for index, (name, parameter) in enumerate(parameters.items()):
        with torch.no_grad():
            parameter.copy_(stored[f"model.{name}"])
        prefix = f"optimizer.{name}/"
        values = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
        states |= {index: values} if values else {}
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    return curve
