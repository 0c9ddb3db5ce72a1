"""Memory that arrays of one step leave to those of the next one."""

import ctypes

#: Parameters of glibc's ``mallopt``, and the largest thresholds that it takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_TRIMMED, _MOST_MAPPED = 2**31 - 1, 32 << 20


def keep_freed() -> None:
    """Let glibc's ``malloc`` keep what is freed, for this process.

    By default it gives memory back to the system as soon as the arrays of a step are freed, and
    the next step takes a page fault for each 4 KiB again: a third of the time of a small model.
    Other C libraries stay as they are.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_TRIM_THRESHOLD, _MOST_TRIMMED)
        mallopt(_MMAP_THRESHOLD, _MOST_MAPPED)
