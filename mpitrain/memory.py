"""Memory of this process: what is free for it, and what one step leaves to the next one."""

import ctypes
from math import inf
from pathlib import Path

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


def available(root: Path = Path("/")) -> float:
    """Bytes of memory that are free, or fewer if this is all that a control group may have.

    ``root``: folder of ``proc`` and ``sys``.  Infinite if the system says nothing.
    """
    found = [inf]
    for line in _lines(root / "proc/meminfo"):
        found += [1024 * float(line.split()[1])] * line.startswith("MemAvailable:")
    for line in _lines(root / "proc/self/cgroup"):
        _, kind, path = line.split(":", 2)
        group = root / "sys/fs/cgroup" / kind / path.lstrip("/")
        for folder in (group, *group.parents):
            for name in ("memory.max", "memory.limit_in_bytes"):
                found += [float(most) for most in _lines(folder / name) if most.isdigit()]
    return min(found)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
