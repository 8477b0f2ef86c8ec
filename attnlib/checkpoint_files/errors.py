"""The error of every folder that is not read."""


class CheckpointError(ValueError):
    """A checkpoint folder is malformed, unsafe to open, of an unknown kind, or changed meanwhile."""

    exit_code = 3  # of a command that ends with it
