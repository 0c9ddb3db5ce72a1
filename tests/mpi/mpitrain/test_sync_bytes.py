"""Bytes that strategies send, counted where messages start, against their formulas."""

import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.codec import Dice
from mpitrain.config import Compress, Sync
from mpitrain.parallel.compressed_summation import CompressedSummation
from mpitrain.parallel.sent_bytes import coded_bytes, dense_bytes
from mpitrain.parallel.summation import Dense
from mpitrain.sync.delayed import Delayed
from mpitrain.sync.local import Local
from mpitrain.training import build
from tests.mpi.mpitrain import test_sync_arithmetic as arithmetic

pytestmark = [pytest.mark.mpi, pytest.mark.quick_on(3)]
P = MPI.COMM_WORLD.size
STEPS = 12
STRATEGIES = {
    "local": lambda own: Local(own, Sync(kind="local", period=3, outer="plain")),
    "diloco": lambda own: Local(own, Sync(kind="local", period=4, outer="nesterov")),
    "fragments": lambda own: Local(own, Sync(kind="local", period=6, outer="plain", fragments=3)),
    "delayed": lambda own: Delayed(own, Sync(kind="delayed", period=2, delay=3)),
    "each step": lambda own: Delayed(own, Sync(kind="delayed", period=1, delay=0)),
}
#: Times that each element is exchanged in as many steps.
TIMES = {"local": 4, "diloco": 3, "fragments": 2, "delayed": 6, "each step": 12}


@pytest.mark.parametrize("codec", ["none", "bf16"])
@pytest.mark.parametrize("widths", [(5, 9, 3), (1,)], ids=["odd", "fewer than ranks"])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_workers_send_an_all_reduce_a_period(monkeypatch, kind, widths, codec):
    """Delayed ones of the last steps are under way: they were sent, too."""
    if kind == "fragments" and len(widths) == 1:
        pytest.skip("a fragment has a layer")
    monkeypatch.setattr(arithmetic, "WIDTHS", widths)
    how = None if codec == "none" else build.compression(Compress(codec, least=1))

    def summation():
        dense = Dense("ring")
        return CompressedSummation(how, Dice(1, comm.rank), dense) if how else dense

    with Communicator(MPI.COMM_WORLD) as comm:
        traffic = comm.count_traffic()
        own = arithmetic.workers(comm, summation=summation)
        strategy = STRATEGIES[kind](own)
        before = traffic.sent + traffic.shared
        for step in range(STEPS):
            own.parameters[...] -= arithmetic.RATE * arithmetic.gradient(comm, comm.rank, step)
            strategy.after_step(step)
        strategy.quiesce()
        sent = comm.allreduce(traffic.sent + traffic.shared - before)
        # Of sums of codes, one small all-reduce more says which tensors a worker has used.
        exchanges = TIMES[kind] * (len(widths) if kind == "fragments" else 1)
        assert traffic.native == (exchanges if how and P > 1 else 0)
        strategy.close()
    shapes = [(width, 1) for width in widths]
    once = dense_bytes(8 * sum(widths), P)
    if how and kind == "fragments":
        once = sum(coded_bytes(how, [shape], P, 8) for shape in shapes)
    elif how:
        once = coded_bytes(how, shapes, P, 8)
    assert sent == TIMES[kind] * once
