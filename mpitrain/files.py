"""Files of records, to which lines are appended."""

import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path


def begin(path: Path, lines: Iterable[bytes]) -> FileIO:
    """A file to append to, unbuffered, so that a full disk is noticed at once.

    Args:
        path: its name; a file that has it is replaced.
        lines: its beginning, which may come from that file.
    """
    # A new folder is private; an old one keeps its permissions.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = b"".join(lines)
    beside = path.with_suffix(".unfinished")
    beside.unlink(missing_ok=True)  # a run that was killed left it, or it is no file at all
    beside.write_bytes(kept)
    beside.rename(path)
    return FileIO(path, "a")


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file still has that name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
