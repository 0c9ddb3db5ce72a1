"""Gradients summed over ranks: when, in what order, and by what."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives.algorithms import ALGORITHMS, names
from mpitrain import nn
from mpitrain.parallel.arena import DATA, Arena
from mpitrain.parallel.data_parallel import Replicated, WholeGradients
from mpitrain.parallel.store import Reduction
from mpitrain.parallel.summation import Dense
from mpitrain.parallel.zero import ShardedGradients, ShardedOptimizer, ShardedParameters
from tests.mpi.mpitrain.layouts import changed, curve, equal, mlp

EVERY_ALLREDUCE = ["native", *names("allreduce")]


# Algorithms that cut a buffer into chunks reduce each in another order of the ranks, so that the
# order for an element depends on where its bucket begins.  Algorithms of one chunk cannot tell.
@pytest.mark.parametrize(
    "algorithm",
    [a.name for a in ALGORITHMS if a.collective == "allreduce" and a.schedule(64).chunks == 1],
)
def test_bucket_size_changes_no_bit_where_order_ignores_it(comm, algorithm):
    config = mlp(algorithm=algorithm)
    first, *others = (
        curve(comm, changed(config, bucket_bytes=size), steps=5)[1] for size in (1, 1000, 2**20)
    )
    for other in others:
        equal(other, first)


@pytest.fixture
def store(comm):
    """Builds a store of two layers, of 3 and 5 numbers."""

    def make(algorithm="auto", kind=Replicated, empty=np.empty, **options):
        layers = {"a": nn.Linear(3, 1, bias=False), "b": nn.Linear(5, 1, bias=False)}
        arena = Arena(layers, {"a": {"weight": (3, 1)}, "b": {"weight": (5, 1)}})
        reduction = Reduction({DATA: comm}, Dense(algorithm), bucket_bytes=1, **options)
        return kind(arena, np.zeros(8), reduction, empty)

    return make


def backward(store, rank):
    """Gradients of rank r are r + 1 times 0, 1, 2 ..., the last layer's first."""
    store.reset()
    for layer, values in ((1, np.arange(3.0, 8)), (0, np.arange(3.0))):
        store.accumulate(layer, {"weight": (rank + 1) * values.reshape(-1, 1)})
        store.ready(layer)
        store.progress()


@pytest.mark.parametrize(
    "kind", [Replicated, ShardedOptimizer, ShardedGradients, ShardedParameters]
)
def test_the_first_gradients_of_a_step_replace_those_before(comm, store, kind):
    own = store(kind=kind, empty=comm.empty)
    whole = [own.gradients] if isinstance(own, WholeGradients) else []
    for used in (1, 0):  # the other tensor has no part in the loss
        for gradients in (*(piece.gradients for piece in own.pieces), *whole):
            gradients[...] = np.nan
        own.reset()
        values = np.full((3 if used == 0 else 5, 1), -0.0)
        values[0] = comm.rank + 1.0
        for layer in (1, 0, 1, 0):  # two micro-batches
            own.accumulate(layer, {"weight": values if layer == used else None})
        own.wait()
        found = np.zeros(8)
        for piece in own.pieces:
            found[piece.start : piece.stop] = piece.gradients
        if not own.is_replicated:
            comm.Allreduce(MPI.IN_PLACE, found)
        expected = np.zeros(8)
        expected[3 * used] = comm.size * (comm.size + 1)
        assert found.tobytes() == expected.tobytes()  # without -0.0
        assert own.used == {"b.weight" if used else "a.weight"}
    own.close()


def summed(comm):
    return comm.size * (comm.size + 1) // 2 * np.arange(8)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("algorithm", ["auto", *EVERY_ALLREDUCE])
def test_gradients_are_summed_in_every_step(comm, store, algorithm, overlap):
    own = store(algorithm=algorithm, overlap=overlap)
    for _ in range(3):
        backward(own, comm.rank)
        if not overlap:  # nothing moves until the end
            comm.Barrier()
            own.progress()
            np.testing.assert_array_equal(own.gradients, (comm.rank + 1) * np.arange(8))
        assert own.wait() >= 0
        np.testing.assert_array_equal(own.gradients, summed(comm))
    own.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", EVERY_ALLREDUCE)
def test_a_bucket_is_reduced_before_the_layers_below_are_ready(comm, store, algorithm):
    own = store(algorithm=algorithm)
    own.accumulate(1, {"weight": (comm.rank + 1) * np.arange(3.0, 8).reshape(-1, 1)})
    own.ready(1)
    expected = np.where(np.arange(8) < 3, 0, summed(comm))
    for _ in range(100_000):
        own.progress()
        if comm.allreduce(np.array_equal(own.gradients, expected), op=MPI.LAND):
            break
    np.testing.assert_array_equal(own.gradients, expected)
    own.wait()
    own.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("more", [0, 1])
def test_equal_shards_of_a_layer_are_gathered_by_a_call_of_equal_blocks(comm, monkeypatch, more):
    """Which is parsed once, whereas unequal ones are parsed in each pass."""
    monkeypatch.setattr(type(comm), "Allgather" if more else "Allgatherv", None)
    size = 4 * comm.size + more
    arena = Arena({"a": nn.Linear(size, 1, bias=False)}, {"a": {"weight": (size, 1)}})
    reduction, values = Reduction({DATA: comm}, Dense()), np.arange(float(size))
    own = ShardedParameters(arena, values, reduction, comm.empty)
    np.testing.assert_array_equal(own.take(0)["weight"][:, 0], values)
    own.release(0)
    own.close()
