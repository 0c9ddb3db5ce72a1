"""Adasum of the workers' gradients and ways, against its definition and processes by themselves."""

from itertools import islice, pairwise

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from collectives import Communicator
from mpitrain.config import Optim, Sync
from mpitrain.parallel.adasum_sum import Adasum
from mpitrain.parallel.sent_bytes import adasum_bytes
from mpitrain.start import start
from tests.adasum import adasum
from tests.cases import slow_case
from tests.mpi.mpitrain.layouts import RANKS, close, curve, job, whole
from tests.mpi.mpitrain.summands import shards, summand
from tests.mpi.mpitrain.test_sync import simulated

SHAPES = {
    "odd": [(7, 11), (5,), (3, 3, 5), (1, 1)],
    "smaller than the ranks": [(1, 1)],
    "nothing": [],
}


@pytest.mark.parametrize("has_shards", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, slow_case(np.float64)])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_it_is_that_of_the_tree_and_sends_what_it_says(shapes, dtype, has_shards):
    sizes = [int(np.prod(shape)) for shape in shapes]
    ends, n = np.cumsum([0, *sizes]), sum(sizes)

    def given(rank, run):
        drawn = np.random.default_rng([rank, run]).normal(size=n).astype(dtype)
        if rank >= RANKS // 2:
            drawn[: sum(sizes[:1])] = 0  # a tensor in which these ranks have no part
        return drawn

    with Communicator(MPI.COMM_WORLD) as comm:
        traffic = comm.count_traffic()
        own = comm.empty(n, dtype)
        counts = shards(n)
        total = np.empty(counts[comm.rank], dtype) if has_shards else own
        plan = Adasum().bind(summand(comm, own, shapes, total, counts if has_shards else None))
        for run in range(2):
            own[...] = given(comm.rank, run)
            before = traffic.sent + traffic.shared
            plan.Start()
            plan.Wait()
            sent = comm.allreduce(traffic.sent + traffic.shared - before)
            every = [given(rank, run) for rank in range(RANKS)]
            expected = np.empty(n, dtype)
            for a, b in pairwise(ends):
                parts = [one[a:b] for one in every]
                expected[a:b] = sum(part.any() for part in parts) * adasum(parts)
            if has_shards:
                start = sum(counts[: comm.rank])
                expected = expected[start : start + len(total)]
            else:
                assert len({one.tobytes() for one in comm.allgather(own)}) == 1
                assert sent == adasum_bytes(shapes, RANKS, own.itemsize)
            precision = 1e-5 if dtype is np.float32 else 1e-11
            np.testing.assert_allclose(total, expected, rtol=precision, atol=precision)
        assert traffic.native == 0
        plan.Free()


class Ways:
    """Adds the Adasum of the workers' ways, tensor by tensor, to where all of them began."""

    def __init__(self, sync, tensors, weights):
        self.sync, self.weights, self.anchor = sync, weights, weights[0].copy()
        self.parts = [slice(tensor.start, tensor.stop) for tensor in tensors]

    def after(self, step):
        period = self.sync.period if self.sync.kind == "local" else 1
        if step < self.sync.start or (step + 1 - self.sync.start) % period == 0:
            for part in self.parts:
                self.anchor[part] -= adasum([(self.anchor - w)[part] for w in self.weights])
            for w in self.weights:
                w[...] = self.anchor


@pytest.mark.parametrize(
    ("sync", "layout"),
    [
        (Sync(combine="adasum"), {}),
        slow_case(Sync(combine="adasum"), {"zero": 1}),
        (Sync(kind="local", period=2, combine="adasum"), {}),
        (Sync(kind="local", period=2, start=2, combine="adasum"), {}),
    ],
)
def test_workers_train_as_it_says(comm, sync, layout):
    """Descent along the Adasum of gradients, and the rule for changes of weights, or both."""
    plain = Optim(lr=0.05, momentum=0.0, reference_batch=0)
    config = replace(job("mlp", micro_batches=2, **layout), sync=sync, optim=plain)
    with start(comm, config) as trainer:
        list(islice(trainer.run_epoch(0), 4))
        trainer.parts.check_replicas("after the steps")
        trainer.parts.drain()
        found = whole(comm, trainer)
        assert trainer.parts.store.algorithm == "adasum" or RANKS == 1
    ways = lambda _, weights: Ways(sync, trainer.parts.arena.tensors, weights)  # noqa: E731
    plain = replace(config, sync=Sync())
    _, _, expected = simulated(plain, RANKS, 4, averaging=ways)
    close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.skipif(RANKS > 3, reason="three layers")
def test_one_replica_is_dense_and_stages_are_those_of_workers(comm):
    """A tensor is on one stage: a pipeline of all ranks has one worker, and nothing to combine."""
    dense = job("mlp", pipe=RANKS, micro_batches=2 * RANKS)
    expected, _ = curve(comm, dense, steps=3)
    found, _ = curve(comm, replace(dense, sync=Sync(combine="adasum")), steps=3)
    np.testing.assert_array_equal(found, expected)
