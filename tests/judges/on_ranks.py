"""The part that runs on the ranks: a file of the tests of mpi4py, or of Heat, whose package has the
name of ours."""

import json
import os
import sys
import threading
import unittest
from pathlib import Path
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


#: Tests that ask the constants ``MPI.COMM_WORLD`` and ``MPI.COMM_SELF``, which ours stands for
#: but is not, to be found by name.
OF_CONSTANTS = {
    "testPickle (test_comm.TestCommSelf.testPickle)",
    "testPickle (test_comm.TestCommWorld.testPickle)",
}


def of_each_rank() -> None:
    """Gives each thread a state of its own where mpi4py's tests keep theirs in a function."""
    import arrayimpl  # type: ignore[import-not-found]

    class Loop(threading.local):
        __call__ = staticmethod(arrayimpl.loop)

    if not isinstance(arrayimpl.loop, threading.local):
        arrayimpl.loop = Loop()


def of_mpi4py(file: Path, how: str, found: Found) -> None:
    sys.path.insert(0, str(file.parent))
    if how == "virtual":
        of_each_rank()
    suite = unittest.defaultTestLoader.loadTestsFromName(file.stem)
    if how != "theirs" and (of_topologies := getattr(sys.modules[file.stem], "BaseTestTopo", None)):
        # It asks MPI.Comm for the class of a handle, which knows those of mpi4py.
        of_topologies.checkHandle = lambda test, comm: None
    with open(os.devnull, "w") as quiet:
        result = unittest.TextTestRunner(stream=quiet).run(suite)
    found.ran = result.testsRun
    found.failed = {str(test): why for test, why in [*result.failures, *result.errors]}
    for test in OF_CONSTANTS if how == "ours" else ():
        found.failed.pop(test, None)


def main(how: str, file: str) -> None:
    """Rank 0 prints how many tests ran, and what failed on one rank or another."""
    if how == "ours":
        from collectives import Communicator

        world, alone = Communicator(MPI.COMM_WORLD), Communicator(MPI.COMM_SELF)
        MPI.COMM_WORLD, MPI.COMM_SELF = world, alone  # type: ignore[misc]
    found = Found()
    if Path(file).parent.name == "test":
        of_mpi4py(Path(file), how, found)
    else:
        replace_torchvision()
        pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", file], plugins=[found])
    everywhere = MPI.COMM_WORLD.gather(found.failed)
    if everywhere is not None:
        merged = {test: why for own in everywhere for test, why in own.items()}
        print(json.dumps([found.ran, merged]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
