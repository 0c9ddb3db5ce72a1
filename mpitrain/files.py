"""Checks of files: ordinary ones, as reading a FIFO might never end, and those in their place."""

import errno
import os
import stat
from pathlib import Path


def check_regular(path: Path) -> None:
    """Raise OSError if ``path`` is missing, a folder, a FIFO, a socket or a device."""
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    kind = next((name for test, name in kinds if test(mode)), "a device")
    raise OSError(errno.EINVAL, f"it is {kind}, not an ordinary file", str(path))


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file still has that name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
