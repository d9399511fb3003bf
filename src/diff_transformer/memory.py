"""What this process does with memory that it no longer needs."""

import ctypes
import os

# Of mallopt(3), and the variables by which a user sets the same.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
_LARGE = 1 << 28  # bytes from which on an allocation is given back all the same: what is kept may not fit the next


def keep_freed_memory() -> bool:
    """Have the C library keep the memory that tensors free, for the next ones, until the process ends.

    A step on the CPU allocates and frees the same sizes again and again. By default the system gets them back each
    time, and every page has to be taken from it anew: of a training step of the demo, 8 to 16 thousand page faults and
    a fifth of the time. For processes of our own; a library's caller may want it otherwise.

    Returns:
        Whether it was done: the C library must be glibc, and a user's own settings are left alone.
    """
    if any(name in os.environ for name in _USERS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # Windows has no such library, others no such function
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE) and mallopt(_TRIM_THRESHOLD, -1))
