"""The matrix on ranks: what is stopped, and gone on with, and what a failure leaves."""

import pytest
from mpi4py import MPI

from benchmarks.matrix.results import DENSE, SHARED, Cell, Result, read_matrix, write_matrix
from benchmarks.matrix.run import Extent, run
from collectives import Communicator
from mpitrain.config import ConfigError
from mpitrain.step.agreement import NonFinite

pytestmark = [pytest.mark.mpi, pytest.mark.quick_on(3), pytest.mark.at_most(5)]

EXTENT = Extent(3, 60.0)


@pytest.fixture
def comm():
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    with Communicator(MPI.COMM_WORLD) as comm:
        yield comm


@pytest.fixture
def folder(comm, tmp_path):
    """The same on all ranks."""
    return comm.bcast(tmp_path) / "matrix"


def cell(method=DENSE):
    return Cell("digits", method, "ring", "data", SHARED)


def test_a_cell_is_stopped_when_its_time_is_over(comm, folder):
    matrix = run(comm, folder, [cell()], Extent(50, 1e-6), "again")
    found = matrix.cells[cell().key]
    assert found.state == "done" and 1 <= len(found.losses) < 50
    assert found.test_loss is not None


def test_what_has_a_result_is_not_run_again(comm, folder):
    said = []
    run(comm, folder, [cell()], EXTENT, "again", said.append)
    kept = read_matrix(folder / "matrix.json") if comm.rank == 0 else None
    if kept:
        kept.cells[cell("int8").key] = Result("begun", attempts=1)  # the ranks ended in it
        kept.cells[cell("bf16").key] = Result("begun", attempts=2)  # and twice in this one
        write_matrix(folder / "matrix.json", kept)
    comm.Barrier()
    wanted = [cell(), cell("int8"), cell("bf16")]
    matrix = run(comm, folder, wanted, EXTENT, "again", said.append)
    if comm.rank == 0:
        assert len(said) == 3 and "int8" in said[1] and "bf16" in said[2]
        assert matrix.cells[cell().key] == kept.cells[cell().key]
    assert matrix.cells[cell("int8").key].state == "done"
    assert matrix.cells[cell("int8").key].attempts == 2
    assert matrix.cells[cell("bf16").key].why == "the ranks ended in it 2 times"
    with pytest.raises(ConfigError, match="3 steps and 60 s a cell, not of"):
        run(comm, folder, wanted, Extent(4, 60.0), "again")


def test_a_cell_that_fails_leaves_no_communicator_behind(comm, folder, monkeypatch, split_off):
    def failing(trainer, **given):
        assert split_off
        raise NonFinite("as it goes")

    monkeypatch.setattr("benchmarks.matrix.run.train", failing)
    found = run(comm, folder, [cell()], EXTENT, "again").cells[cell().key]
    assert (found.state, found.why) == ("failed", "as it goes")
    assert not split_off
