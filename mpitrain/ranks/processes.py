"""Processes of this machine: their command lines and starting times."""

from pathlib import Path

from collectives.failure.processes import find


def running(word: str) -> dict[int, list[str]]:
    """Command lines, by process number, that have ``word`` among their words."""
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
    """Start of a process, in the system's ticks; empty if it has ended, even if nobody waited."""
    process = find(number)
    return "" if process is None or process.has_ended else process.began
