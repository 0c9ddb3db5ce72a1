"""Settings of all tests, and fixtures of several folders."""

import os
from tempfile import TemporaryDirectory

import pytest

#: Before torch and NumPy are loaded: tests and ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
#: Open MPI's ranks that wait leave their core to the tests beside them.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")

#: Packages that some files of tests are about.
OPTIONAL = {"mpi4py", "torch", "transformers"}


def pytest_configure(config: pytest.Config) -> None:
    """Hide the tuning table of whoever runs the tests."""
    folder = TemporaryDirectory(prefix="mpitrain-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_CONFIG_HOME"] = folder.name


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    """Files that import a package that need not be there are skipped without it."""
    report = yield
    why = report.call.excinfo and report.call.excinfo.value.__cause__
    if isinstance(why, ModuleNotFoundError) and why.name in OPTIONAL:
        report.outcome = "skipped"
        hint = ": make test TORCH=1" if why.name == "torch" else ""
        report.longrepr = (report.nodeid, 0, f"{why.name} is not installed{hint}")
    return report


@pytest.fixture(autouse=True)
def scratch(monkeypatch):
    """A TMPDIR of the test's own, and behind it no variable of ours that the test has left.

    A launcher that is killed leaves its session folder there, named by its process number, and Open
    MPI's next launcher of that number refuses to start ("The PMIx server's listener thread").
    """
    before = {*os.environ}
    with TemporaryDirectory(prefix="mpitrain-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield folder
    for name in {*os.environ} - before:
        if name.startswith(("COLLECTIVES_", "MPITRAIN_")):  # as commands set for their process
            del os.environ[name]


@pytest.fixture(autouse=True)
def nothing_under_way():
    """A plan that a test leaves under way changes how the plans of later tests wait."""
    yield
    from collectives.execution.progress import Progress

    left, Progress().here[:] = [*Progress().here], []
    assert not left


@pytest.fixture
def cupy(request, monkeypatch):
    """The stand-in for CuPy, on one GPU or on ``request.param`` of them, in which an event is done
    when it has been asked three times; nothing may happen in it that nobody has ordered."""
    from tests import queued_cupy

    cupy = queued_cupy.install(monkeypatch, queued_cupy.Machine(getattr(request, "param", 1)))
    yield cupy
    cupy.machine.expect_no_races()
