"""Folders of checkpoints: names, order and removal; folders of other names are left alone."""

import os
import re
import shutil
from pathlib import Path

from mpitrain.checkpoint.manifest import MANIFEST

_NAME = re.compile(r"(step|best)-([0-9]{8,})")
_LEFT = re.compile(r"\.((?:step|best)-[0-9]{8,})\.(unfinished|removed)")


def folder_name(step: int, *, best: bool = False) -> str:
    """Name of the checkpoint after a number of steps, or of the best test's."""
    return f"{'best' if best else 'step'}-{step:08d}"


def step_of(name: str) -> int | None:
    """Step in a checkpoint's name; None for other names."""
    found = _NAME.fullmatch(name)
    step = int(found[2]) if found else 0
    return step if found and name == folder_name(step, best=found[1] == "best") else None


def numbered(folder: Path, *, best: bool = False) -> dict[int, Path]:
    """Folders of checkpoints, or of best tests', by their step, newest first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    found = {
        step: path
        for path in entries
        if (step := step_of(path.name)) is not None
        and path.name == folder_name(step, best=best)
        and path.is_dir()
    }
    return dict(sorted(found.items(), reverse=True))


def unfinished(target: Path) -> Path:
    """Folder in which a checkpoint is written before it has its name."""
    return target.with_name(f".{target.name}.unfinished")


def remove(path: Path, successor: Path | None = None) -> None:
    """Removes a checkpoint, its name first, so that half of one is never found.

    A link is removed alone.  ``successor``: folder that gets the name at once.
    """
    gone = path.with_name(f".{path.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    if path.is_symlink():
        path.unlink()
    else:
        path.rename(gone)
    if successor:
        successor.rename(path)
    shutil.rmtree(gone, ignore_errors=True)


def clean(folder: Path) -> None:
    """Removes the remains of runs that were killed while they wrote or removed a checkpoint.

    A whole one that had no name yet gets it: the one that it replaces may be gone.
    """
    for path in list(folder.iterdir()):
        if left := _LEFT.fullmatch(path.name):
            target, is_whole = folder / left[1], (path / MANIFEST).is_file()
            if left[2] == "unfinished" and is_whole and not os.path.lexists(target):
                path.rename(target)
            shutil.rmtree(path, ignore_errors=True)
