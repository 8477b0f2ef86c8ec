"""A case of every kind from a seed, and what a failing one tells."""

import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attnlib import LayoutWarning

from .draw import Draw
from .drawn import dense, varlen
from .functions import function
from .judge import Mismatch
from .lives import Life
from .selected import selected
from .trees import tree

KINDS: dict[str, Callable] = {
    "dense": dense,
    "varlen": varlen,
    "cached": Life,
    "function": function,
    "tree": tree,
    "selected": selected,
}


@dataclass(frozen=True)
class Failure:
    """A case that failed; as text the command that replays it, what it was and what went wrong."""

    seed: int
    kind: str
    device: str
    case: str
    error: str

    @property
    def command(self) -> str:
        return f"python tests/fuzz --seed {self.seed} --kind {self.kind} --device {self.device}"

    def __str__(self):
        return f"{self.command}\n  {self.case}\n  {self.error}"


def run(seed: int, kind: str, device: str) -> Failure | None:
    """Make and run one case. Memory that nobody wrote holds NaN, and a warning is an error."""
    case, before = "not made", torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", LayoutWarning)  # of shapes that most likely say something else
            if device == "interpreter":  # whose numpy warns of NaN
                warnings.simplefilter("ignore", RuntimeWarning)
            case = KINDS[kind](Draw(seed, device))
            case.check()
    except Mismatch as error:
        return Failure(seed, kind, device, str(case), str(error))
    except Exception:  # whatever else the library raises on a valid call is a finding too
        return Failure(seed, kind, device, str(case), traceback.format_exc())
    finally:
        torch.use_deterministic_algorithms(before)
    return None


def failures(first: int, count: int, device: str, kinds: tuple[str, ...] = tuple(KINDS)) -> Iterator[Failure]:
    """Those of ``count`` cases, kind after kind, from a seed on."""
    for n in range(count):
        failure = run(first + n // len(kinds), kinds[n % len(kinds)], device)
        if failure is not None:
            yield failure
