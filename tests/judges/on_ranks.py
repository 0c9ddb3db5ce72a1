"""The part that runs on the ranks: a file of Heat's tests, whose package has the name of ours."""

import json
import sys
from types import ModuleType

import pytest
from mpi4py import MPI


class Found:
    """A plugin of pytest: how many tests ran, and what failed."""

    def __init__(self) -> None:
        self.ran, self.failed = 0, dict[str, str]()

    def pytest_runtest_logreport(self, report) -> None:
        self.ran += report.when == "call" and not report.skipped
        if report.failed:
            self.failed[report.nodeid.partition("::")[2]] = str(report.longrepr)

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr)


def replace_torchvision() -> None:
    """Heat imports it, and its wheels go with torch's for GPUs alone."""
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms"):
        module = sys.modules[name] = ModuleType(name)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
        module.MNIST = module.Compose = object  # type: ignore[attr-defined]


def main(how: str, file: str) -> None:
    """Rank 0 prints how many tests ran, and what failed on one rank or another."""
    if how == "ours":
        from collectives import Communicator

        world, alone = Communicator(MPI.COMM_WORLD), Communicator(MPI.COMM_SELF)
        MPI.COMM_WORLD, MPI.COMM_SELF = world, alone  # type: ignore[misc]
    replace_torchvision()
    found = Found()
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", file], plugins=[found])
    everywhere = MPI.COMM_WORLD.gather(found.failed)
    if everywhere is not None:
        merged = {test: why for own in everywhere for test, why in own.items()}
        print(json.dumps([found.ran, merged]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
