"""The command ``python -m attnlib doctor``: versions, devices, the backend that runs, and cache safety."""

import argparse
import getpass
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from . import CAUSAL, Explanation, KVCache, KVLayout, attention, cached_attention, explain

PACKAGES = ("attnlib", "torch", "triton", "safetensors", "transformers")
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options to the parser, since the command has none."""


def run(_arguments: argparse.Namespace) -> int:
    """Print the report; return 1 if another user could put code into a folder of compiled kernels."""
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {_version(name)}' for name in PACKAGES)}")
    print("\n".join(_devices()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"\nbackends, for bf16 on {device}")
    explanations = dict(_explanations(device))
    for name, explanation in explanations.items():
        print(f"  {name}")
        print("\n".join(f"    {line}" for line in str(explanation).splitlines()))
    for warning in _warnings(explanations.values()):
        print(f"\n{warning}")
    print("\nkernel-cache folders and who may write to them")
    reasons = {path: unsafe(path) for path in cache_folders()}
    for path, why in reasons.items():
        print(f"  {path}: {why or ('safe' if path.exists() else 'does not exist yet')}")
    return int(any(reasons.values()))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _devices() -> Iterator[str]:
    if not torch.cuda.is_available():
        yield f"no GPU that torch {torch.__version__} can use; {torch.get_num_threads()} CPU threads"
    for n in range(torch.cuda.device_count()):
        x = torch.cuda.get_device_properties(n)
        yield (
            f"GPU {n}: {x.name}, sm_{x.major}{x.minor}, {x.total_memory / 2**30:.0f} GiB, "
            f"CUDA {torch.version.cuda}"
        )


def _warnings(explanations: Iterable[Explanation]) -> Iterator[str]:
    """Yield a warning if a Hopper GPU runs without some of its fast paths."""
    failures = dict.fromkeys(
        failure for x in explanations if x.spec.arch == 90 for failure in x.failures or ()
    )
    if failures:
        yield f"warning: this GPU could be faster; fast paths that are off (see above): {len(failures)}"


def _explanations(device: str) -> Iterator[tuple[str, Explanation]]:
    """Yield explanations of typical calls: which backend runs them, and why others do not."""
    options = {"dtype": torch.bfloat16, "device": device}
    q, k = torch.zeros(1, 64, 8, 128, **options), torch.zeros(1, 64, 2, 128, **options)
    yield "training, GQA of 128 channels", explain(attention, q.requires_grad_(), k, k, mask=CAUSAL)
    with torch.no_grad():
        for name, layout in (
            ("decoding, GQA of 128 channels", KVLayout.grouped(2, 128, dtype=torch.bfloat16)),
            ("decoding, MLA of 512 + 64", KVLayout.latent(512, 64, dtype=torch.bfloat16)),
        ):
            cache = KVCache.paged([layout], pages=1, max_sequences=1, device=device)
            cache.admit()
            with cache.step(1) as (kv,):
                q = torch.zeros(1, 1, 16, layout.dim + layout.rope_dim, **options)
                widths = ((layout.dim,), (layout.rope_dim,)) if layout.is_latent else ((2, 128), (2, 128))
                view = kv.append(*(torch.zeros(1, 1, *width, **options) for width in widths))
                yield name, explain(cached_attention, q, view, mask=CAUSAL)


def cache_folders() -> list[Path]:
    """Return the folders in which Triton and torch's compiler cache compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    triton = os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return [
        Path(triton),
        Path(inductor or Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"),
    ]


def unsafe(path: Path) -> str:
    """Return the reason why other users could write to a folder or replace it, or "" if they cannot."""
    if not hasattr(os, "getuid"):
        return ""
    # With symbolic links, the absolute path `named` differs from `real`; the folders of both must be safe.
    trusted, named, real = {0, os.getuid()}, path.absolute(), path.resolve()
    for folder in (named, real, *named.parents, *real.parents):
        try:
            found = folder.stat()
        except FileNotFoundError:
            continue
        if found.st_uid not in trusted:
            return (
                f"unsafe: {folder} belongs to another user; "
                "set the environment variable to a folder of your own"
            )
        # In a folder with the sticky bit, others may create files, but not replace ours.
        sticky = folder not in (named, real) and found.st_mode & stat.S_ISVTX
        if found.st_mode & OTHERS_WRITE and not sticky:
            return f"unsafe: others may write into {folder}; chmod go-w {folder}"
    return ""
