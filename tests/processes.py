"""Processes of this machine by their command lines."""

from pathlib import Path


def running(word):
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
