"""Processes of this machine, by the words that they were started with, and since when."""

from pathlib import Path

from collectives.failure.processes import find


def running(word: str) -> dict[int, list[str]]:
    """Numbers and words of the processes that have ``word`` among theirs."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if word in words:
            found[int(entry.name)] = words
    return found


def began(number: int) -> str:
    """When a process began, in the system's ticks; empty if it has ended, even if nobody waited."""
    process = find(number)
    return "" if process is None or process.has_ended else process.began
