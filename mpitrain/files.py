"""Files of records, to which lines are appended, and files that are written whole."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from stat import S_IMODE


def begin(path: Path, lines: Iterable[bytes]) -> FileIO:
    """A file to append to, unbuffered, so that a full disk is noticed at once.

    Args:
        path: its name; a file that has it is replaced.
        lines: its beginning, which may come from that file.
    """
    # A new folder is private; an old one keeps its permissions.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, lambda beside: beside.write_bytes(b"".join(lines)))
    return FileIO(path, "a")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file, which has its name, and the mode of the one before it, when it is on disk."""
    beside = path.with_name(f".{path.name}.unfinished")
    beside.unlink(missing_ok=True)  # a run that was killed left it, or it is no file at all
    beside.touch()
    mode = S_IMODE((path if path.exists() else beside).stat().st_mode)
    try:
        write(beside)
        beside.chmod(mode)  # safetensors makes files for their owner alone
        sync(beside)
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of files, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def being_written(path: Path, kind: type[Exception]) -> Iterator[None]:
    """Makes an error of the system one of ``kind``, which says what can be done."""
    try:
        yield
    except OSError as error:
        raise kind(
            f"{error.filename or path} cannot be written: {error.strerror}; make room or choose "
            "another run.dir, and train --resume goes on from the newest checkpoint"
        ) from error


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file still has that name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
