"""Hogwild: one copy in the node's memory, that all ranks update without locks."""

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from mpitrain.checkpoint.saving import resume
from mpitrain.config import Config, Data, Model, Optim, Run, Server, Train
from mpitrain.data import DataError, Dataset, Samples
from mpitrain.run import train
from mpitrain.server.hogwild import Unlocked
from mpitrain.start import start
from mpitrain.training.parts import UserObjects
from mpitrain.update.agreement import NonFinite
from tests.cases import slow_case
from tests.mpi.mpitrain.layouts import RANKS, close, equal, to_the_end, whole
from tests.mpi.mpitrain.test_server import delays, quick, slow, without

pytestmark = pytest.mark.at_most(5)


def job(folder, dtype="float32", steps=12, micro_batches=2, hogwild=True):
    return Config(
        run=Run(seed=3, dtype=dtype, dir=str(folder)),
        data=Data(name="clicks", samples=600, tables=5, rows=200),
        model=Model(kind="recommender", width=4, hidden=(8,)),
        optim=Optim(lr=0.3, reference_batch=0, momentum=0.0),
        train=Train(epochs=9, steps=steps, batch_size=48, micro_batches=micro_batches),
        server=Server(hogwild=hogwild, window=5),
    )


def trained(comm, config, **given):
    with start(comm, config, **given) as trainer:
        records = to_the_end(trainer)
        times = trainer.parts.account.times(trainer.parts.grid.place)
        assert all(rank < trainer.parts.comm.size for one in times.ranks for rank in one.waiting)
        return whole(comm, trainer), records


@slow
@pytest.mark.parametrize("hogwild", [True, "tables"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_worker_is_one_process_bit_by_bit(comm, folder, dtype, hogwild):
    config = job(folder / str(comm.rank), dtype, hogwild=hogwild)
    found, records = trained(MPI.COMM_SELF, config)
    expected, theirs = trained(MPI.COMM_SELF, without(config))
    equal(found, expected)
    assert [r.loss for r in records] == [r.loss for r in theirs]
    assert all(not record.served for record in records)


@quick
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_updates_that_do_not_meet_are_never_lost(comm, dtype):
    """Neighbouring numbers of different ranks, thousands of times at once, as if one by one."""
    size, pushes = 101, 2000
    window = MPI.Win.Allocate_shared(8 * size if comm.rank == 0 else 0, 1, comm=comm)
    flat, rank_of = np.frombuffer(window.Shared_query(0)[0], dtype)[:size], np.arange(size) % RANKS
    flat[rank_of == comm.rank] = 0
    link, own = Unlocked(flat), np.where(rank_of == comm.rank, 1.0 + comm.rank, 0.0).astype(dtype)
    comm.Barrier()
    for clock in range(pushes):
        link.push(clock, 1, own, 0.25)
    comm.Barrier()
    found = flat.copy()
    del link, flat
    comm.Barrier()
    window.Free()
    np.testing.assert_array_equal(found, -0.25 * (1.0 + rank_of) * pushes)


@quick
def test_tables_without_locks_and_a_synchronous_rest_are_one_process(comm, folder):
    """Where no two samples have a row in common, whoever comes first."""
    samples, tables = 600, 5
    rng = np.random.default_rng(1)
    inputs = np.stack([rng.permutation(samples) for _ in range(tables)], axis=1)
    labels = rng.integers(0, 2, samples)
    data = Dataset(Samples(inputs, labels), Samples(inputs[:50], labels[:50]), 2)
    config = job(folder, "float64", hogwild="tables")
    # Bytes that the MPI library sends are not known.
    parallel = replace(config.parallel, algorithm="ring")
    config = replace(config, data=replace(config.data, rows=samples), parallel=parallel)
    objects = UserObjects(data=data)
    found, records = trained(comm, config, objects=objects, before_step=delays(comm, 7))
    expected, theirs = trained(MPI.COMM_SELF, without(config), objects=objects)
    close(found, expected, rtol=0, atol=1e-13)
    curves = ([(r.loss, r.grad_norm) for r in some] for some in (records, theirs))
    np.testing.assert_allclose(*curves, rtol=1e-10)
    if RANKS > 1:  # of the tables nothing is sent
        rest = sum(v.size for name, v in expected.items() if not name.endswith("table"))
        assert 0 < records[0].sent_bytes + records[0].shared_bytes < 3 * 8 * rest + 1000


@slow
@pytest.mark.parametrize("hogwild", [True, "tables"])
def test_all_ranks_train_one_copy(comm, folder, hogwild):
    """To about where one process gets; no two runs are alike, bit by bit."""
    config = job(folder, steps=60, hogwild=hogwild)
    found, records = trained(comm, config, before_step=delays(comm, 7))
    expected, theirs = trained(MPI.COMM_SELF, without(config))
    assert [record.step for record in records] == list(range(1, 61))
    close(found, expected, rtol=0, atol=0.2)
    last = [np.mean([r.loss for r in some[-10:]]) for some in (records, theirs)]
    assert last[0] == pytest.approx(last[1], abs=0.1) and last[0] < records[0].loss - 0.05


@quick
@pytest.mark.parametrize("hogwild", [slow_case(True), "tables"])
def test_its_checkpoints_are_everybodys(comm, folder, hogwild):
    config = job(folder, steps=10, hogwild=hogwild)
    with start(comm, config) as trainer:
        train(trainer)
        expected = whole(comm, trainer)
    with start(comm, without(config)) as trainer:
        assert resume(trainer.parts).step == 10
        equal(whole(comm, trainer), expected)
    longer = replace(config, train=replace(config.train, steps=15))
    with start(comm, longer) as trainer:
        assert resume(trainer.parts).step == 10
        equal(whole(comm, trainer), expected)
        train(trainer, go_on=True)
        assert trainer.parts.steps_done == 15


@quick
@pytest.mark.parametrize("hogwild", [slow_case(True), "tables"])
@pytest.mark.parametrize("at", [0, slow_case(3), slow_case(4)])
def test_an_error_of_one_worker_is_one_of_all_ranks(comm, folder, hogwild, at):
    """At a window's first batch, within it and at its last."""

    def fail(parts):
        if comm.rank == RANKS - 1 and parts.steps_done == at:
            raise DataError("bad sector")

    with (
        start(comm, job(folder, hogwild=hogwild), before_step=fail) as trainer,
        pytest.raises(DataError, match="bad sector"),
    ):
        list(trainer.run_epoch(0))


@quick
@pytest.mark.parametrize("at", [1, slow_case(4)])
def test_what_is_not_finite_on_one_rank_ends_the_run_on_all(comm, folder, at):
    """Rows of the own samples, which nobody else sees; in a window, and at its end."""
    config = job(folder, hogwild="tables")
    with start(comm, config) as trainer:
        compute = trainer._side._compute

        def broken(clock, *rest):
            loss, unused = compute(clock, *rest)
            if clock == at and comm.rank == RANKS - 1:
                loss = float("nan")
            return loss, unused

        trainer._side._compute = broken
        with pytest.raises(NonFinite, match="is not finite at step"):
            list(trainer.run_epoch(0))
