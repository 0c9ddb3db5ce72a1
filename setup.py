"""The packages, and README for an index; all else is in pyproject.toml and MANIFEST.in."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# The example jobs and job scripts of jobs/ are installed as mpitrain/jobs/.
JOBS = ["mpitrain.jobs", "mpitrain.jobs.examples", "mpitrain.jobs.sites"]


def description() -> str:
    """README where its files are not at hand: no pictures, and links to files as plain words."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)\s]*\)", r"\1", text)


if __name__ == "__main__":
    setup(
        packages=[*find_packages(include=["collectives*", "mpitrain*"]), *JOBS],
        package_dir={"mpitrain.jobs": "jobs"},
        include_package_data=True,
        long_description=description(),
        long_description_content_type="text/markdown",
    )
