"""The doctor on all ranks, and checks that go wrong on one."""

import pytest

from mpitrain.doctor import CHECKS, Finding, Status, doctor
from mpitrain.doctor.finding import gathered

pytestmark = pytest.mark.at_most(5)


def test_a_machine_that_runs_these_tests_is_well(comm, folder, capsys):
    assert doctor(comm, folder / "runs") == 0
    out = capsys.readouterr().out
    if comm.rank == 0:
        count = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
        assert f"ok   launcher     {count}, as started" in out
        assert f"{len(CHECKS)} checks, 0 failed" in out
    else:
        assert out == ""
    comm.Barrier()
    assert not list((folder / "runs").iterdir())


def test_a_folder_that_cannot_be_written(comm, folder, capsys):
    (folder / "file").touch()
    assert doctor(comm, folder / "file" / "runs") == 1
    if comm.rank == 0:
        assert "FAIL checkpoints" in capsys.readouterr().out


def test_a_check_that_breaks_on_one_rank_fails_on_all(comm):
    def local():
        if comm.rank == comm.size - 1:
            raise OSError("no such thing")
        return 1

    found = gathered(comm, "broken", local, lambda values: Finding(Status.OK, "fine"))
    assert found.status is Status.FAIL
    assert found.text == f"rank {comm.size - 1}: OSError: no such thing"
