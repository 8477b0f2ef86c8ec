"""The error for a checkpoint folder that cannot be read."""


class CheckpointError(ValueError):
    """A checkpoint folder is malformed, unsafe to open, of an unknown type, or changed while in use."""

    exit_code = 3  # exit code of a command that fails with this error
