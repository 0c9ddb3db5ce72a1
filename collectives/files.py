"""Files that others may read while they are written."""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Writes a whole file, or leaves the one that was there; no reader sees a part of it.

    What is no ordinary file, as ``/dev/stdout``, cannot be replaced, and is written to.

    Args:
        path: of the file, or of a link to it.
        text: all that is to be in it, line ends as they are.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        with path.open("w", newline="") as file:
            file.write(text)
        return
    target = Path(os.path.realpath(path))
    # A name of its own: others may be writing the same file.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("x", newline="") as file:
            file.write(text)
        partial.replace(target)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):  # of the name that was asked for
            raise type(error)(error.errno, error.strerror, str(path)) from None
        raise
