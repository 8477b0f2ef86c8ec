"""Compare the tensors of a folder with the model that transformers builds from its config.json.

transformers' own loading code compares names and shapes. It gets tensors without data, which take no memory,
so the model may have any size. Only stacked experts take memory if accelerate is not installed.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ...checkpoint_files.folder import read_folder
from ..checkpoint.errors import CheckpointError
from ..stock import class_of, quiet, read_config, stock

Amiss = dict[str, set[str]]


def amiss(folder: Path, *, follow_links: bool = False) -> Amiss:
    """Return the tensors that are missing, unexpected or misshapen when transformers loads a folder.

    Raises:
        CheckpointError: transformers rejects config.json, or it joins several stored tensors into one and
            some of them are missing.
    """
    # transformers would allocate memory for stacked experts unless they are on the meta device. It accepts
    # device_map="meta" only if accelerate is installed.
    where = {"device_map": "meta"} if stock().utils.is_accelerate_available() else {}
    zero = torch.zeros((), device=where.get("device_map"))
    checkpoint = read_folder(folder, follow_links=follow_links)
    tensors, config = checkpoint.tensors, read_config(checkpoint)
    try:
        with quiet():
            _, info = class_of(config).from_pretrained(
                None,
                config=config,
                state_dict={name: zero.expand(stored.entry.shape) for name, stored in tensors.items()},
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **where,
            )
    except RuntimeError as error:  # raised if transformers cannot join the stored parts of a tensor
        named = ", ".join(_holes(tensors)) or str(error)[:200]
        raise CheckpointError(
            f"expected all parts of the tensors that transformers assembles, got none of {named}"
        ) from error
    mismatched = {f"{name} {list(stored)} for {list(made)}" for name, stored, made in info["mismatched_keys"]}
    return {
        "missing": set(info["missing_keys"]),
        "unexpected": set(info["unexpected_keys"]),
        "mismatched": mismatched,
    }


def listed(found: Mapping[str, set[str]]) -> str:
    """List the first five names in a result of :func:`amiss`; return an empty string if there are none."""
    names = [f"{what} {name}" for what, some in found.items() for name in sorted(some)]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _holes(names: Iterable[str]) -> list[str]:
    """Return the names of missing expert tensors in layers where other experts have such a tensor."""
    found = [
        match.groups() for name in names if (match := re.fullmatch(r"(.*\.experts\.)([0-9]+)(\..*)", name))
    ]
    layers = {layer: {(n, part) for other, n, part in found if other == layer} for layer, _, _ in found}
    return sorted(
        f"{layer}{n}{part}"
        for layer, held in layers.items()
        for n in {n for n, _ in held}
        for part in {part for _, part in held}
        if (n, part) not in held
    )
