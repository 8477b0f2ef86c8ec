"""The errors of a conversion, each with an exit code for the command.

| code | meaning |
|---|---|
| 0 | success |
| 1 | the result cannot be written (:class:`OutputError`) |
| 2 | wrong request (:class:`RequestError`; argparse uses the same code) |
| 3 | the folder cannot be read (:class:`CheckpointError`) |
| 4 | the result is wrong (:class:`VerificationError`) |
| 5 | no space left (:class:`NoSpaceError`) |
"""

from ...checkpoint_files.errors import CheckpointError as CheckpointError


class RequestError(ValueError):
    """The options are invalid, the target folder is unusable, or another run is writing there."""

    exit_code = 2


class VerificationError(ValueError):
    """The new weights are wrong, or the written result failed verification."""

    exit_code = 4


class DamageError(VerificationError):
    """A written file no longer has the bytes that were written; the next run writes it again."""


class OutputError(OSError):
    """The result could not be written; a later run resumes from the finished shards."""

    exit_code = 1


class NoSpaceError(OutputError):
    """The file system is full or a quota is exhausted."""

    exit_code = 5
