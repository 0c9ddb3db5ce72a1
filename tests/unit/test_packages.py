"""The distribution holds every package; ``make wheel-check`` builds it and tries it out."""

from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(
    {
        path.parent
        for package in ("collectives", "mpitrain")
        for path in (ROOT / package).rglob("*.py")
    }
)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_folder_with_modules_is_a_package_that_is_installed(folder):
    name = ".".join(folder.relative_to(ROOT).parts)
    assert name in find_packages(str(ROOT), include=["collectives*", "mpitrain*"])
