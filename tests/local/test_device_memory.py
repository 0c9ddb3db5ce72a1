"""Plans on GPUs whose work is queued: what nobody has ordered happens in another order.

The ranks are in this process, each with a GPU of ``tests/queued_cupy``.
tests/mpi/collectives/test_device.py is on a real one, where there is one.
"""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.calls.buffers import read_buffer
from collectives.errors import InvalidBuffer
from collectives.execution.local import run
from tests.cases import every_algorithm
from tests.local.device_ranks import Ranks
from tests.local.device_scenarios import later, read, unheld
from tests.local.references import lengths

ROADS = ["direct", "staged"]


@pytest.mark.parametrize("road", ROADS)
@every_algorithm
def test_every_algorithm(monkeypatch, algorithm, road):
    for size, seed in ((1, None), (2, None), (3, 1), (5, 2)):
        schedule = algorithm.schedule(size)
        combine = np.maximum if schedule.contract.idempotent else np.add
        rng = np.random.default_rng(size)
        sent, received = zip(*lengths(schedule, 7))
        inputs = [rng.integers(0, 50, count) for count in sent]
        ranks = Ranks(monkeypatch, size, road, seed)
        sends = [ranks.put(rank, items) for rank, items in enumerate(inputs)]
        plans = ranks.bind(schedule, sends, received, combine)
        for _ in range(2):
            ranks.start(plans)
            ranks.wait(plans)
            for got, wanted in zip(ranks.results(), run(schedule, inputs, combine)):
                assert (got is None and wanted is None) or np.array_equal(got, wanted)
        ranks.machine.expect_no_races()


def test_test_is_true_when_the_host_can_read(monkeypatch):
    """Without messages by way of the host, too: a scenario has those."""
    assert read(monkeypatch, None, "direct")


def test_synchronize_lets_the_host_read(monkeypatch):
    ranks = Ranks(monkeypatch, 2, "staged")
    plans, total = ranks.all_reduce()
    ranks.start(plans)
    ranks.move(plans)
    for plan in plans:
        plan.synchronize()
    assert all(np.array_equal(out._a, total) for out in ranks.outputs)


@pytest.mark.parametrize("road", ROADS)
def test_the_host_does_not_wait_for_the_callers_work(monkeypatch, road):
    """Neither at the start nor at the end, nor for a plan that starts later."""
    assert unheld(monkeypatch, None, road)
    assert later(monkeypatch, None, road)


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_buffers_that_are_freed_at_once(monkeypatch, seed):
    """The input is dropped after Wait, and its memory is written over by the caller's stream."""
    ranks = Ranks(monkeypatch, 2, "staged", seed)
    for turn in range(3):
        plans, total = ranks.all_reduce(60 + turn)
        ranks.start(plans)
        ranks.wait(plans)
        outputs = ranks.results()
        for plan in plans:
            plan.Free()
        del plans
        for rank, got in enumerate(outputs):
            assert np.array_equal(got, total)
            ranks.put(rank, np.full(60 + turn, 9))
    ranks.machine.expect_no_races()


def test_staged_messages_go_in_parts_and_share_pinned_memory(monkeypatch):
    monkeypatch.setattr("collectives.execution.transport.device.PART_BYTES", 4096)
    ranks = Ranks(monkeypatch, 4, "staged")
    for count in (5000, 4000):
        plans, total = ranks.all_reduce(count)
        for _ in range(3):
            ranks.start(plans)
            ranks.wait(plans)
            assert all(np.array_equal(got, total) for got in ranks.results())
    # A round of a ring sends and receives a quarter; messages of their own would have had 12 times
    # as much, for each of the two plans.
    in_a_round = 2 * (5000 * 8 // 4)
    assert all(t.bounces.nbytes <= 2 * (in_a_round + 2 * 4096) for t in ranks.transports)
    ranks.machine.expect_no_races()


def test_device_arrays_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("collectives.execution.memory._is_device_address", lambda address: True)
    told = {"shape": (3,), "typestr": "<f4", "data": (0, False), "version": 3}
    with pytest.raises(InvalidBuffer, match="needs CuPy: pip install cupy-cuda13x"):
        read_buffer(SimpleNamespace(__cuda_array_interface__=told), "send")
