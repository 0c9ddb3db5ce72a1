"""Files that are written while others read them, that may have no end, or that have no name."""

import ctypes
import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

#: A file cannot be replaced in its folder, and may be writable itself: one that is mounted alone.
_NOT_REPLACED = (errno.EACCES, errno.EBUSY, errno.EPERM, errno.EROFS, errno.EXDEV)

#: Programs started later do not inherit the descriptor (``linux/memfd.h``).
_CLOSED_IN_OTHERS = 1
#: Links that follow one another before the system gives up.
_LINKS = 40


def replace(path: Path, text: str) -> None:
    """Writes a whole file, or leaves the one that was there; no reader sees a part of it.

    A stream, as ``/dev/stdout``, is appended to.  A file that can be written but not replaced, as
    one that is mounted alone, is overwritten.

    Args:
        path: the file, or a link to it.
        text: its new contents, with line ends as they are.

    Raises:
        OSError: it cannot be written.
    """
    if is_stream(path):
        try:
            with path.open("a", encoding="utf-8", newline="") as file:
                file.write(text)
        except OSError as error:  # a write does not name the file
            raise type(error)(error.errno, error.strerror, str(path)) from None
        return
    target = Path(os.path.realpath(path))
    # A name of its own: others may be writing the same file.
    partial = target.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with partial.open("x", encoding="utf-8", newline="") as file:
            if target.exists():
                os.chmod(partial, stat.S_IMODE(target.stat().st_mode))
            file.write(text)
        partial.replace(target)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError):
            raise
        if error.errno in _NOT_REPLACED and target.exists() and os.access(target, os.W_OK):
            with target.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
            return
        # The caller knows this name alone.
        raise type(error)(error.errno, error.strerror, str(path)) from None


def check_regular(path: Path) -> None:
    """Raises OSError if ``path`` is missing, a folder, a FIFO, a socket or a device."""
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    kind = next((name for test, name in kinds if test(mode)), "a device")
    raise OSError(errno.EINVAL, f"it is {kind}, not an ordinary file", str(path))


def read_regular(path: Path) -> bytes:
    """The contents of a file; errors of :func:`check_regular`, as reading a FIFO may never end."""
    check_regular(path)
    return path.read_bytes()


def anonymous(name: str) -> int:
    """A descriptor of a new file in memory, which no folder has and only ``/proc`` calls ``name``.

    ``os.memfd_create`` is missing where Python was built beside an older C library than it runs
    on, as conda's and uv's are.

    Raises:
        OSError: no more such files, or the C library makes none.
    """
    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    if create is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "memfd_create")
    descriptor: int = create(name.encode(), _CLOSED_IN_OTHERS)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "memfd_create")
    return descriptor


def is_stream(path: Path) -> bool:
    """Whether :func:`replace` appends to ``path``."""
    return _is_open_already(path) or (path.exists() and not path.is_file())


def _is_open_already(path: Path) -> bool:
    """Whether a path names a stream of a process, which a shell has opened."""
    name = os.fspath(path)
    for _ in range(_LINKS):
        folder = os.path.realpath(os.path.dirname(name))
        if folder.startswith("/proc/"):
            return True
        if not os.path.islink(name):
            break
        name = os.path.join(folder, os.readlink(name))
    return False
