"""Codes between nodes, of their sums: against the same codes on a rank for each node."""

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from collectives import Communicator
from collectives.codec import Dice
from mpitrain.config import Compress, ConfigError
from mpitrain.parallel.compressed_summation import CompressedSummation
from mpitrain.parallel.sent_bytes import coded_bytes
from mpitrain.parallel.summation import Dense
from mpitrain.start import start
from mpitrain.training import build
from tests.mpi.mpitrain.layouts import curve, mlp
from tests.mpi.mpitrain.summands import summand

pytestmark = [pytest.mark.mpi, pytest.mark.quick_on(3)]
RANKS = MPI.COMM_WORLD.size
#: Nodes of two ranks, the last one perhaps of one.
NODES = -(-RANKS // 2)
SHAPES = [(12, 10), (7,), (5, 9)]
SIZE = 120 + 7 + 45


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setattr(Communicator, "Split_type", lambda self, *_: self.Split(self.rank // 2))


def bound(comm, table, replica):
    """A sum by codes, its memory, and the traffic."""
    own = comm.empty(SIZE)
    made_by = CompressedSummation(build.compression(table), Dice(1, replica), Dense())
    return made_by.bind(summand(comm, own, SHAPES)), made_by, own


def given(rank, step):
    """Whole numbers: a node's sum is exact."""
    return np.random.default_rng([rank, step]).integers(-99, 99, SIZE).astype(float)


CODECS = ["int8", "powersgd:rank=2,min_rate=0", "topk:keep=0.2", "qsgd", "randomk"]


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(
    "codec", [pytest.param(c, marks=() if c == "int8" else pytest.mark.slow) for c in CODECS]
)
def test_it_is_the_code_of_nodes_sums_bit_by_bit(comm, nodes, codec):
    """A rank for each node, given its sum, has the same results, and keeps the same."""
    table = Compress(codec, least=20, level="nodes")
    first = comm.rank % 2 == 0
    alike = comm.Split(first, comm.rank)
    with Communicator(MPI.COMM_WORLD) as world:
        traffic = world.count_traffic()
        found, made_by, own = bound(world, table, comm.rank)
        if first:
            theirs = bound(alike, replace(table, level="ranks"), comm.rank)
        for step in range(5):
            own[...] = given(comm.rank, step)
            before = traffic.sent + traffic.shared
            made_by.begin(step, 1.0)
            found.Start()
            found.Wait()
            sent = comm.allreduce(traffic.sent + traffic.shared - before)
            if not codec.startswith("topk"):  # whose supports differ
                assert sent == coded_bytes(
                    build.compression(table), SHAPES, RANKS, own.itemsize, nodes=NODES
                )
            one = own.copy()
            if first:
                plan, other, values = theirs
                values[...] = sum(given(r, step) for r in (comm.rank, comm.rank + 1) if r < RANKS)
                other.begin(step, 1.0)
                plan.Start()
                plan.Wait()
                np.testing.assert_array_equal(one, values)
                left = [(k.name, k.start, k.values.tolist()) for k in made_by.kept()]
                assert left == [(k.name, k.start, k.values.tolist()) for k in other.kept()]
            told = comm.allgather(one.tobytes())
            assert told == [told[0]] * RANKS
            for summation in (made_by, *([other] if first else [])):
                (summation.rollback if step == 2 else summation.commit)()
        found.Free()
        if first:
            plan.Free()
    alike.Free()


def test_on_one_node_nothing_is_coded(comm):
    config = mlp("float64")
    coded = replace(config, compress=Compress("int4", level="nodes", least=1))
    algorithm = replace(config.parallel, algorithm="halving_doubling")
    expected, _ = curve(comm, replace(config, parallel=algorithm), steps=3)
    found, _ = curve(comm, coded, steps=3)
    np.testing.assert_array_equal(found, expected)
    with start(comm, coded) as trainer:
        assert trainer.parts.store.reason.endswith("one node")


@pytest.mark.mpi(min_size=3)
def test_what_another_rank_kept_is_handed_over_and_not_lost(comm, nodes):
    """As after a resume on other nodes: the last rank of a node has a part of what was left."""
    found, made_by, own = bound(comm, Compress("topk:keep=0.2", least=20, level="nodes"), comm.rank)
    for kept in made_by.kept():
        kept.values[...] = np.arange(kept.values.size)
    own[...] = given(comm.rank, 0)
    total = comm.allreduce(own.copy())

    def left():
        flat = np.zeros(SIZE)
        for kept in made_by.kept():
            flat[kept.start : kept.start + kept.values.size] += kept.values
        return comm.allreduce(flat)

    before = left()
    made_by.begin(0, 4.0)
    own *= 4.0  # the loss scale
    found.Start()
    found.Wait()
    made_by.commit()
    np.testing.assert_array_equal(own / 4.0 + left(), total + before)
    if comm.rank % 2:
        assert not any(kept.values.any() for kept in made_by.kept())
    found.Free()


@pytest.mark.parametrize("last", ["Split_type", "Split"])
def test_mpi_has_no_more_communicators(comm, monkeypatch, last):
    """Some have room for 2048, two for each bucket: a sentence on all ranks."""

    def full(*_):
        raise MPI.Exception(MPI.ERR_OTHER)

    if comm.rank == comm.size - 1 or last == "Split":
        monkeypatch.setattr(Communicator, last, full)
    else:  # it would be on its way for ever
        monkeypatch.setattr(Communicator, last, lambda *_: comm)
    with pytest.raises(ConfigError, match=r"^compress.level: .*; raise parallel.bucket_bytes, or"):
        bound(comm, Compress("int8", least=20, level="nodes"), comm.rank)
