"""Files that are files: a FIFO or a device in the place of one would be read for ever."""

import errno
import stat
from pathlib import Path


def check_regular(path: Path) -> None:
    """Refuse what is no ordinary file.

    Raises:
        OSError: it is missing, or a folder, a FIFO, a socket or a device.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
    )
    kind = next((name for test, name in kinds if test(mode)), "a device")
    raise OSError(errno.EINVAL, f"it is {kind}, not an ordinary file", str(path))
