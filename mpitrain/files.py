"""Check for ordinary files, as reading a FIFO or a device might never end."""

import errno
import stat
from pathlib import Path


def check_regular(path: Path) -> None:
    """Check that ``path`` is an ordinary file.

    Raises:
        OSError: it is missing, or is a folder, a FIFO, a socket or a device.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    kind = next((name for test, name in kinds if test(mode)), "a device")
    raise OSError(errno.EINVAL, f"it is {kind}, not an ordinary file", str(path))
