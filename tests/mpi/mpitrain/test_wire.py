"""Bytes that were counted where messages start, against the formulas of each code."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.codec import Dice
from mpitrain.compress import CODECS, parse
from mpitrain.compress.codec import Sparse
from mpitrain.config import Compress
from mpitrain.parallel.compressed_summation import CompressedSummation
from mpitrain.parallel.sent_bytes import coded_bytes, dense_bytes
from mpitrain.parallel.summation import Dense
from mpitrain.training import build
from tests.cases import slow_case
from tests.mpi.mpitrain.summands import shards, summand

P = MPI.COMM_WORLD.size
SHAPES = {
    "odd": [(7, 11), (5,), (3, 3, 5), (1, 1)],
    "smaller than the ranks": [(1, 2)],
    "one vector": [(9,)],
    "large": [(120, 77), (77,)],
}
each_dtype = pytest.mark.parametrize("dtype", [np.float32, slow_case(np.float64)])
NAMES = [*CODECS, "powersgd:rank=2,min_rate=0", "topk:keep=0.3", "topk:warmup=4"]


def sums(comm, how, shapes, dtype):
    """A bucket's exchange, bound to gradients that all ranks have the same."""
    own = comm.empty(sum(int(np.prod(shape)) for shape in shapes), dtype)
    made_by = CompressedSummation(how, Dice(1, comm.rank), Dense())
    traffic = comm.count_traffic()
    return made_by.bind(summand(comm, own, shapes)), made_by, own, traffic


@each_dtype
@pytest.mark.parametrize("name", NAMES)
def test_a_code_sends_what_its_formula_says(name, dtype):
    code = parse(name)
    how = build.compression(Compress(name, least=1))
    assert coded_bytes(how, [], P) == dense_bytes(0, P) == 0
    for shapes in SHAPES.values():
        with Communicator(MPI.COMM_WORLD) as comm:
            found, made_by, own, traffic = sums(comm, how, shapes, dtype)
            own[...] = np.random.default_rng(4).normal(size=own.size)
            pairs, runs = 0, 2
            if isinstance(code, Sparse) and made_by.sums:
                packed = made_by.sums[0].packed
                packed.pack(1.0)
                drawn = packed.coded.array.copy()
                made_by.sums[0].memory.add_to(drawn)
                pairs, runs = len(code.select(drawn, 0)), 1
                made_by.rollback()
            before = traffic.sent + traffic.shared
            for run in range(runs):
                made_by.begin(run, 1.0)
                found.Start()
                found.Wait()
            sent = comm.allreduce(traffic.sent + traffic.shared - before)
            assert traffic.native == 0 or not made_by.sums
            if made_by.sums:
                assert sent == runs * coded_bytes(how, shapes, P, own.itemsize, pairs)
            found.Free()


@pytest.mark.parametrize("name", ["topk:keep=0.1", "dgc:keep=0.1,momentum=0"])
def test_what_a_ring_prunes_is_left_to_the_rank_that_pruned_it(name):
    """Quarters, whose sums are exact: sums and what is left add up to what the ranks have given."""
    how = build.compression(Compress(name, least=1, sparse="pruned_ring"))
    with Communicator(MPI.COMM_WORLD) as comm:
        found, made_by, own, _ = sums(comm, how, SHAPES["large"][:1], np.float64)
        rng, given, told = np.random.default_rng([9, comm.rank]), 0, 0
        for step in range(6):
            own[...] = rng.integers(-9, 10, own.size) / 4
            given = given + own
            made_by.begin(step, 1.0)
            found.Start()
            found.Wait()
            told = told + own
            made_by.commit()
        left = made_by.sums[0].memory.value
        assert np.array_equal(comm.allreduce(given), told + comm.allreduce(left))
        assert (told != 0).mean() < 0.7 and np.abs(told).max() > 0
        found.Free()


@each_dtype
@pytest.mark.parametrize(
    ("name", "error"),
    [("bf16", 2**-8), ("int8", 1 / 127), ("terngrad", 1), ("qsgd", 3), ("atomo", np.inf)],
)
def test_a_sum_of_shards_sends_half_of_two_phases(name, error, dtype):
    """Bound anew for each backward pass, of whose dice each has its own.

    ``error``: of a rank's largest number.
    """
    how = build.compression(Compress(name, "off", least=2))
    for shapes in SHAPES.values():
        counts = shards(n := sum(int(np.prod(shape)) for shape in shapes))
        with Communicator(MPI.COMM_WORLD) as comm:
            traffic = comm.count_traffic()
            made_by = CompressedSummation(how, Dice(1, comm.rank), Dense(), anew=True)
            made_by.begin(0, 1.0)
            found = []
            for _ in range(2):
                own = np.random.default_rng(4).normal(size=n).astype(dtype)
                exact = P * own
                shard, start = np.empty(counts[comm.rank], dtype), sum(counts[: comm.rank])
                sum_ = made_by.bind(summand(comm, own, shapes, shard, counts))
                before = traffic.sent + traffic.shared
                coded = made_by.sums[0].packed if made_by.sums else None
                sum_.Start()
                sum_.Wait()
                sent = comm.allreduce(traffic.sent + traffic.shared - before)
                if coded is not None:
                    most = max(coded.coded.counts)
                    assert sent == coded_bytes(how, shapes, P, own.itemsize, shard=most)
                    assert traffic.native == 0
                sum_.Free()
                assert not made_by.sums and made_by.is_finite
                own_part, most = exact[start : start + len(shard)], np.abs(exact).max()
                np.testing.assert_allclose(shard, own_part, rtol=0, atol=error * most)
                found.append(shard)
            alike = comm.allreduce(np.array_equal(*found), op=MPI.LAND)
            if coded is not None and n > 100 and name in ("terngrad", "qsgd"):
                assert not alike
