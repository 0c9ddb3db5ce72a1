"""The matrix on ranks: what is trained, refused, gone on with, and that links change no number."""

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from benchmarks.matrix.results import DENSE, SHARED, Cell, Result, read_matrix, write_matrix
from benchmarks.matrix.run import Extent, run
from collectives import Communicator, delayed
from mpitrain.config import ConfigError, load
from mpitrain.start import start
from mpitrain.step.agreement import NonFinite

pytestmark = [pytest.mark.mpi, pytest.mark.quick_on(3), pytest.mark.at_most(5)]

THIN = "latency=2ms,bandwidth=1Gb/s"
EXTENT = Extent(3, 60.0)
METHODS = (DENSE, "int8")


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


def cell(method=DENSE, layout="data", link=SHARED):
    return Cell("digits", method, "ring", layout, link)


def test_links_change_seconds_and_no_loss(comm, folder):
    wanted = [cell(m, link=link) for m in METHODS for link in (SHARED, THIN)]
    said = []
    kept = folder / "runs" / "own"  # as with --out . where somebody trains
    if comm.rank == 0:
        kept.mkdir(parents=True)
    matrix = run(comm, folder, wanted, EXTENT, "again", said.append)
    assert len(said) == (len(wanted) if comm.rank == 0 else 0)
    for method in METHODS:
        here, there = (matrix.cells[cell(method, link=link).key] for link in (SHARED, THIN))
        assert here.state == there.state == "done"
        assert here.losses == there.losses and len(here.losses) == 3
        assert here.test_loss == there.test_loss
        assert there.shared_bytes == 0
        if comm.size > 1:
            assert here.encoded_bytes == there.encoded_bytes
            # Every step has messages that wait for one another.
            assert there.seconds[-1] >= 3 * 0.002
    dense = matrix.cells[cell(link=THIN).key]
    if comm.size > 1:
        # One all-reduce of all gradients; what comes on top is what ranks tell each other.
        assert dense.dense_bytes <= dense.sent_bytes <= 1.001 * dense.dense_bytes + 2000
        code = matrix.cells[cell("int8", link=THIN).key]
        assert code.encoded_bytes < 0.27 * dense.encoded_bytes
        assert 0 < code.codec_share < code.comm_share <= 1
    assert dense.codec_share == 0
    if comm.rank == 0:
        assert read_matrix(folder / "matrix.json").cells == matrix.cells
        assert "<svg" in (folder / "matrix.html").read_text()
        left = ["matrix.html", "matrix.json", "runs"]
        assert sorted(path.name for path in folder.iterdir()) == left and kept.exists()


def test_workers_that_train_by_themselves(comm, folder):
    wanted = [cell(method, link=THIN) for method in (DENSE, "local")]
    matrix = run(comm, folder, wanted, Extent(9, 60.0), "again")
    dense, local = (matrix.cells[one.key] for one in wanted)
    assert dense.state == local.state == "done" and len(local.losses) == 9
    assert local.encoded_bytes == dense.encoded_bytes / 8
    if comm.size > 1:
        # One exchange in eight steps, and one in the end.
        assert local.sent_bytes < 0.3 * dense.sent_bytes
    np.testing.assert_allclose(local.losses[0], dense.losses[0], rtol=1e-5)


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


def test_a_folder_that_cannot_be_written_is_an_error_of_all(comm, folder):
    if comm.rank == 0:
        folder.write_text("a file")
    comm.Barrier()
    with pytest.raises(ConfigError, match="--out: "):
        run(comm, folder, [cell()], EXTENT, "again")


def test_a_job_that_sends_in_other_ways_is_refused_on_a_link(comm):
    job = load(Path("digits_mlp"), ["parallel.checksums=true"])
    with (
        Communicator(comm, transport=delayed(THIN)) as linked,
        pytest.raises(ConfigError, match=r"a link .* needs messages that can be delayed"),
    ):
        start(linked, job)
