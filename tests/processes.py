"""Processes of this machine by their command lines, and waiting for what they do."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """Number and words of each process."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            yield int(entry.name), (entry / "cmdline").read_text(errors="replace").split("\0")


def running(word: str) -> dict[int, list[str]]:
    """Command lines, by process number, that have ``word`` among their words."""
    return {number: words for number, words in command_lines() if word in words}


def until(there: Callable[[], object], seconds: float = 60.0, pause: float = 0.02) -> bool:
    """Whether ``there()`` comes true in time; it is asked after each ``pause``, in seconds."""
    end = monotonic() + seconds
    while not (found := bool(there())) and monotonic() < end:
        sleep(pause)
    return found
