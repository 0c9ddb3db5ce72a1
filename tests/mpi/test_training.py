"""Data-parallel training on all ranks against the same training on one."""

from itertools import islice
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from mpi4py import MPI
from mpitrain.parallel.data import GradientReducer

from collectives import Communicator
from collectives.algorithms import ALGORITHMS, names
from mpitrain.arena import Arena
from mpitrain.config import Config, Model, Optim, Parallel, Run, Train
from mpitrain.parallel.replicas import ReplicaMismatch
from mpitrain.threads import limit_blas_threads
from mpitrain.trainer import NonFiniteLoss, Trainer

pytestmark = pytest.mark.mpi

MODELS = {
    "mlp": Model(kind="mlp", hidden=(32, 16)),
    "convnet": Model(kind="convnet", hidden=(16,), channels=(4, 8)),
}
EVERY_ALLREDUCE = ["native", *names("allreduce")]


@pytest.fixture(scope="module")
def comm():
    with Communicator(MPI.COMM_WORLD) as world, limit_blas_threads(world):
        yield world


def job(kind="mlp", dtype="float32", batch_size=64, algorithm="ring", **parallel):
    return Config(
        run=Run(seed=3, dtype=dtype),
        model=MODELS[kind],
        optim=Optim(lr=0.05, weight_decay=1e-4),
        train=Train(epochs=2, batch_size=batch_size),
        parallel=Parallel(algorithm, **{"bucket_bytes": 2048, **parallel}),
    )


def train(comm, config, steps=None):
    """(loss and gradient norm of each step of an epoch, parameters after it)"""
    with Trainer(comm, config) as trainer:
        records = islice(trainer.run_epoch(0), steps)
        curve = [(record.loss, record.grad_norm) for record in records]
        return np.array(curve), trainer.arena.parameters


def one_rank(config, steps=None):
    with Communicator(MPI.COMM_SELF) as alone:
        return train(alone, config, steps)


# An epoch is 23 batches of 64 samples, of which 3, 5 and 8 ranks get uneven or few ones, and the
# last batch has 29.
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("kind", MODELS)
def test_any_number_of_ranks_gives_the_curve_of_one(comm, kind, dtype, rtol):
    config = job(kind, dtype)
    curve, parameters = train(comm, config)
    expected, expected_parameters = one_rank(config)
    assert len(curve) == 23
    np.testing.assert_allclose(curve, expected, rtol=rtol)
    np.testing.assert_allclose(parameters, expected_parameters, rtol=rtol, atol=rtol)
    assert curve[-5:, 0].mean() < 0.9 * curve[:5, 0].mean()


@pytest.mark.parametrize("kind", MODELS)
def test_ranks_without_a_sample(comm, kind):
    config = job(kind, "float64", batch_size=2)
    curve, _ = train(comm, config, steps=20)
    expected, _ = one_rank(config, steps=20)
    np.testing.assert_allclose(curve, expected, rtol=1e-11)


@pytest.mark.parametrize("algorithm", EVERY_ALLREDUCE)
def test_replicas_are_bitwise_equal_after_every_epoch(comm, algorithm):
    with Trainer(comm, job(algorithm=algorithm, batch_size=100)) as trainer:
        for epoch in (0, 1):
            before = trainer.arena.parameters.copy()
            list(trainer.run_epoch(epoch))
            assert (trainer.arena.parameters != before).any()
            replicas = comm.allgather(trainer.arena.parameters.tobytes())
            assert len(set(replicas)) == 1


@pytest.mark.parametrize("algorithm", names("allreduce"))
def test_overlap_changes_no_bit(comm, algorithm):
    (_, overlapped), (_, at_the_end) = (
        train(comm, job(algorithm=algorithm, overlap=overlap)) for overlap in (True, False)
    )
    np.testing.assert_array_equal(overlapped, at_the_end)


# Algorithms that cut a buffer into chunks reduce each in another order of the ranks, so that the
# order for an element depends on where its bucket begins.  Those of one chunk cannot tell.
@pytest.mark.parametrize(
    "algorithm",
    [a.name for a in ALGORITHMS if a.collective == "allreduce" and a.schedule(64).chunks == 1],
)
def test_bucket_size_changes_no_bit_where_order_ignores_it(comm, algorithm):
    results = [
        train(comm, job("convnet", algorithm=algorithm, bucket_bytes=size))[1]
        for size in (1, 1000, 2**20)
    ]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.mpi(min_size=2)
def test_a_replica_that_diverges_is_caught_on_all_ranks(comm):
    with Communicator(MPI.COMM_WORLD) as world:
        trainer = Trainer(world, job(batch_size=500))
        list(trainer.run_epoch(0))
        if comm.rank == comm.size - 1:
            parameters = trainer.arena.parameters
            parameters[7] = np.nextafter(parameters[7], np.float32(np.inf))
        with pytest.raises(ReplicaMismatch, match=rf"after epoch 1: rank {comm.size - 1} against"):
            list(trainer.run_epoch(1))
        trainer.close()


@pytest.mark.mpi(min_size=2)
def test_initial_values_that_differ_are_caught_before_the_first_step(comm):
    with TemporaryDirectory() as folder:
        trainer = Trainer(comm, Config(run=Run(seed=comm.rank, dir=folder), model=MODELS["mlp"]))
        with pytest.raises(ReplicaMismatch, match="before the first step"):
            trainer.train()
        assert trainer.steps_done == 0
        trainer.close()


def test_all_ranks_agree_that_the_loss_is_not_finite(comm):
    with Trainer(comm, job()) as trainer:
        before = trainer.arena.parameters.copy()
        if comm.rank == comm.size - 1:
            trainer.data.train.inputs[...] = np.nan
        with pytest.raises(NonFiniteLoss, match="the loss is nan at step 1;"):
            list(trainer.run_epoch(0))
        np.testing.assert_array_equal(trainer.arena.parameters, before)


def test_every_test_sample_is_judged_once(comm):
    with Trainer(comm, job(batch_size=50)) as trainer:
        list(trainer.run_epoch(0))
        logits, _ = trainer.model.forward(trainer.arena.parameter_views, trainer.data.test.inputs)
        expected = np.mean(logits.argmax(axis=1) == trainer.data.test.labels)
        assert trainer.evaluate() == pytest.approx(expected, rel=1e-12)


@pytest.fixture
def arena(comm):
    """Gradients of rank r are r + 1 times 0, 1, 2 ...: two layers of 3 and 5."""
    arena = Arena([{"weight": np.zeros(3)}, {"weight": np.zeros(5)}])
    arena.gradients[:] = (comm.rank + 1) * np.arange(8)
    return arena


def summed(comm):
    return comm.size * (comm.size + 1) // 2 * np.arange(8)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("algorithm", ["auto", *EVERY_ALLREDUCE])
def test_gradients_are_summed_in_every_step(comm, arena, algorithm, overlap):
    reducer = GradientReducer(comm, arena, algorithm=algorithm, bucket_bytes=1, overlap=overlap)
    for _ in range(3):
        arena.gradients[:] = (comm.rank + 1) * np.arange(8)
        for layer in (1, 0):
            reducer.ready(layer)
            reducer.progress()
        assert reducer.wait() >= 0
        np.testing.assert_array_equal(arena.gradients, summed(comm))
    reducer.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", EVERY_ALLREDUCE)
def test_a_bucket_is_reduced_before_the_layers_below_are_ready(comm, arena, algorithm):
    reducer = GradientReducer(comm, arena, algorithm=algorithm, bucket_bytes=1)
    reducer.ready(1)
    for _ in range(100_000):
        reducer.progress()
        complete = np.array_equal(arena.gradients[3:], summed(comm)[3:])
        if comm.allreduce(complete, op=MPI.LAND):
            break
    np.testing.assert_array_equal(arena.gradients[3:], summed(comm)[3:])
    np.testing.assert_array_equal(arena.gradients[:3], (comm.rank + 1) * np.arange(3))
    reducer.wait()
    np.testing.assert_array_equal(arena.gradients, summed(comm))
    reducer.close()


def test_without_overlap_nothing_moves_until_the_end(comm, arena):
    reducer = GradientReducer(comm, arena, algorithm="ring", bucket_bytes=1, overlap=False)
    for layer in (1, 0):
        reducer.ready(layer)
        reducer.progress()
    comm.Barrier()
    reducer.progress()
    np.testing.assert_array_equal(arena.gradients, (comm.rank + 1) * np.arange(8))
    reducer.wait()
    np.testing.assert_array_equal(arena.gradients, summed(comm))
    reducer.close()
