"""What can go wrong in a conversion, each with the exit code of a command that ends with it.

0 is success and 2 a wrong request (:class:`RequestError`, as argparse has it), 3 a folder that is not read
(:class:`CheckpointError`); 1 is left for what is none of these.
"""

from ...checkpoint_files.errors import CheckpointError as CheckpointError


class RequestError(ValueError):
    """The request itself is wrong: where the result should go, or that another run is writing there."""

    exit_code = 2


class VerificationError(ValueError):
    """The result was written, and is not what it should be."""

    exit_code = 4


class DamageError(VerificationError):
    """What was written is not what is there any more; the next run writes it again."""


class OutputError(OSError):
    """The result could not be written; what was finished waits to be resumed."""

    exit_code = 1


class NoSpaceError(OutputError):
    """The file system has too little room, or a quota is used up."""

    exit_code = 5
