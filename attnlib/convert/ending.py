"""Run a command of this package: turn its errors into one line on stderr and an exit code."""

import sys
from collections.abc import Callable, Sequence

from .checkpoint.errors import CheckpointError, OutputError, RequestError, VerificationError
from .wording import in_options

INTERRUPTED = 130


def finished(command: str, work: Callable[[], object]) -> int:
    """Call ``work`` and return 0, or the exit code of the error that it raised, which is printed."""
    try:
        work()
    except KeyboardInterrupt as error:
        return failed(command, "interrupted", getattr(error, "__notes__", []), INTERRUPTED)
    except (CheckpointError, RequestError, VerificationError, OutputError) as error:
        return failed(command, in_options(str(error)), getattr(error, "__notes__", []), error.exit_code)
    except ImportError as error:
        return failed(command, str(error), [], RequestError.exit_code)
    return 0


def failed(command: str, reason: str, notes: Sequence[str], code: int) -> int:
    """Print why a command failed, with its notes, in one line, and return its exit code."""
    line = " ".join("; ".join([reason, *notes]).split())
    print(f"python -m attnlib {command}: {line}", file=sys.stderr)
    return code
