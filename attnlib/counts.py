"""Counts of tokens, pages, heads and channels, which must fit int32. Plain Python."""

INT32 = 2**31 - 1


def check_count(name: str, value: int, *, least: int = 0) -> None:
    """Refuse what is not an int of at least ``least`` that int32 holds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    if value > INT32:
        raise ValueError(f"{name}: expected at most {INT32}, since lengths and pages are int32, got {value}")
