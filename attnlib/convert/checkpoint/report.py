"""Build conversion_report.json: the request, the memory saved, layer errors, and the check's result.

The report has no times, durations or paths, so equal requests give equal bytes.
"""

import math
from collections.abc import Mapping

from ...models.own_form import split_config
from .model import CheckpointModel, token_bytes
from .names import TEXT
from .plan import Plan

REPORT = "conversion_report.json"


def make_report(
    model: CheckpointModel,
    plan: Plan,
    *,
    identity: Mapping[str, object],
    layers: Mapping[str, Mapping[str, float | None]],
    nonfinite: Mapping[str, Mapping[str, int]],
    outputs: Mapping[str, str],
    checked: Mapping[str, object],
) -> dict[str, object]:
    """Return the report as a JSON object.

    - ``identity``: the request and the sha256 of every input
    - ``layers``: the errors of each layer
    - ``nonfinite``: the tensors that contain NaN or infinities
    - ``outputs``: the sha256 of every written file
    - ``checked``: the result of the caller's check
    """
    source = model.checkpoint.config
    result, of_layers = split_config(plan.config)
    return {
        **identity,
        "outputs": dict(outputs),
        "layers": [{"layer": index, **layers[str(index)]} for index in model.layers],
        "cache_bytes_per_token": {
            "before": token_bytes(source, model),
            "after": token_bytes(plan.config, model),
        },
        "config_changes": _changes(source, result) | of_layers,
        "config_keys_dropped": [key for key in source if key not in result],
        "not_finite": dict(nonfinite),
        "not_copied": list(model.checkpoint.left_behind),
        "attention_tensors_copied_as_they_are": list(model.unknown),
        "verified": checked["check"] != "failed",
        **checked,
    }


def _changes(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of ``after`` that differ from ``before``; ``text_config`` is compared by key."""
    changed = {key: x for key, x in after.items() if key not in before or before[key] != x}
    old, new = before.get(TEXT), changed.get(TEXT)
    return changed | (
        {TEXT: _changes(old, new)} if isinstance(old, Mapping) and isinstance(new, Mapping) else {}
    )


def plain_errors(errors: Mapping[str, float]) -> dict[str, float | None]:
    """Return errors that JSON can store: NaN and infinite values become None."""
    return {name: float(value) if math.isfinite(value) else None for name, value in errors.items()}
