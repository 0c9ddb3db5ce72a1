"""Which folders are checkpoints: their names, their order, and how one goes away.

A user may keep folders of other names, as ``step-best``, beside them; nothing here sees those.
"""

import re
import shutil
from pathlib import Path

_NAME = re.compile(r"(step|best)-([0-9]{8,})")
_LEFT = re.compile(r"\.(step|best)-[0-9]{8,}\.(unfinished|removed)")


def folder_name(step: int, *, best: bool = False) -> str:
    """The name of the checkpoint after a number of steps, or of the one of the best test."""
    return f"{'best' if best else 'step'}-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name; nothing if it is no such name."""
    found = _NAME.fullmatch(name)
    step = int(found[2]) if found else 0
    return step if found and name == folder_name(step, best=found[1] == "best") else None


def numbered(folder: Path, *, best: bool = False) -> dict[int, Path]:
    """The folders with a checkpoint's name by their step, newest first; or those of best tests."""
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
    """Where a checkpoint is written before it has its name."""
    return target.with_name(f".{target.name}.unfinished")


def remove(path: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that half of one is never found.

    Of a link, the link alone.
    """
    if path.is_symlink():
        path.unlink()
        return
    gone = path.with_name(f".{path.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def clean(folder: Path) -> None:
    """Delete what a run left that was killed while it wrote or removed a checkpoint."""
    for path in folder.iterdir():
        if _LEFT.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
