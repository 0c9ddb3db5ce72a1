"""matplotlib, which only pictures need."""

from pathlib import Path
from typing import Any

from collectives.errors import CollectiveError, needed

SUFFIXES = (".png", ".svg", ".pdf")


def expect_picture(path: Path) -> None:
    """Raises :class:`CollectiveError` if ``path`` names no picture, or is in no folder."""
    if path.suffix.lower() not in SUFFIXES:
        raise CollectiveError(f"cannot draw into {path}: name a file that ends with .png or .svg")
    if path.is_dir() or not path.parent.is_dir():
        raise CollectiveError(f"cannot write {path}: it is a folder, or its folder does not exist")


def pyplot() -> Any:
    """matplotlib's ``pyplot``, which draws into files.

    Raises:
        CollectiveError: matplotlib is not installed.
    """
    needed("matplotlib", "plot", "a picture", CollectiveError).use("Agg")
    return needed("matplotlib", "plot", "a picture", CollectiveError, "matplotlib.pyplot")
