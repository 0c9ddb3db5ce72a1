"""Each rank's calls one by one, in orders of the ranks that the machine hardly ever takes.

Real ranks meet such an order once in a million runs, and then compute something else.
"""

import random
from itertools import chain, permutations

import numpy as np
import pytest

from collectives.algorithms import ALGORITHMS, Algorithm
from collectives.analysis.verify import verify
from collectives.contracts import contract
from collectives.execution.messages import Operands, bind
from collectives.execution.plan import Binding
from tests.local.references import lengths, reference
from tests.local.shared_ranks import (
    COUNT,
    LENDS_AND_WRITES,
    CountingNode,
    Layout,
    in_shared_memory,
    in_two,
    interleave,
    reduces_in_turn,
    steps_of,
)


class Ranks(Layout):
    """All ranks of a collective in shared memory, each with two runs of a plan."""

    def __init__(self, schedule, in_place):
        super().__init__(schedule, in_place)
        counters = [memoryview(np.zeros(4, np.int64)) for _ in self.sent]
        nodes = [CountingNode(rank, self.buffers, counters) for rank in range(schedule.size)]
        self.plans = [self.bind(node, Binding()) for node in nodes]

    def inputs(self, turn):
        rng = np.random.default_rng(turn)
        return [rng.integers(0, 10, n).astype(float) for n in self.sent]

    def run(self, rank):
        """Yields after each call whether it was one, or a wait that is not over."""
        for turn in range(2):
            send, recv = self.buffers[rank]
            mine = self.inputs(turn)[rank]
            if self.first[rank] is None:
                send[:] = mine
            else:
                start = self.first[rank] * COUNT
                recv[start : start + mine.size] = mine
            yield from steps_of(self.plans[rank])
            schedule = self.schedule
            wanted = reference(schedule.collective, self.inputs(turn), rank, schedule.root)
            if wanted is not None and recv.size:
                np.testing.assert_array_equal(recv, wanted)

    def all(self, choose):
        runs = {rank: self.run(rank) for rank in range(self.schedule.size)}
        interleave(runs, choose, self.schedule)


def orders(size):
    """One rank runs ahead as far as it can, then the next; and drawn ones."""
    ahead = permutations(range(size)) if size <= 3 else [range(size), range(size)[::-1]]
    for order in ahead:
        yield lambda ranks, order=tuple(order): sorted(ranks, key=order.index)
    for seed in range(2):
        draws = random.Random(seed)
        yield lambda ranks, draws=draws: draws.sample(ranks, len(ranks))


@pytest.mark.parametrize(("schedule", "in_place"), list(in_shared_memory(3)))
def test_shared_memory_in_any_order_of_the_ranks(schedule, in_place, monkeypatch):
    for choose in orders(schedule.size):
        Ranks(schedule, in_place).all(choose)
    in_two(monkeypatch, schedule)
    for choose in [*orders(schedule.size)][::2]:
        Ranks(schedule, in_place).all(choose)


IN_TURN = Algorithm("allreduce", "in_turn", reduces_in_turn, chunks=lambda size: 2)


@pytest.mark.parametrize("schedule", [LENDS_AND_WRITES, IN_TURN.schedule(3)], ids=str)
def test_what_a_peer_reads_is_written_to_later(schedule):
    assert verify(schedule)
    for choose in orders(3):
        Ranks(schedule, False).all(choose)


class Leaving:
    """A message that is on its way from Start until it has been waited for."""

    def __init__(self, data):
        self.data, self.left = data, None

    def Start(self):
        self.left = self.data.copy()

    def Wait(self):
        assert np.array_equal(self.data, self.left), "it changed while it was being sent"
        self.left = None


class Arriving:
    """A message that brings anything, once it is waited for."""

    def __init__(self, data, rng):
        self.data, self.rng, self.started = data, rng, False

    def Start(self):
        self.started = True

    def Wait(self):
        assert self.started
        self.data[:] = self.rng.integers(0, 99, self.data.size)
        self.started = False


class Alone:
    """The transport of one rank, whose peers are nowhere."""

    longest = 40

    def __init__(self, rank):
        self.rank = rank
        self.rng = np.random.default_rng(rank)
        self.sends, self.receives = [], []

    def send_init(self, data, peer, tag):
        self.sends.append(Leaving(data))
        return self.sends[-1]

    def recv_init(self, data, peer, tag):
        self.receives.append(Arriving(data, self.rng))
        return self.receives[-1]

    @staticmethod
    def testall(requests):
        raise AssertionError("a blocking call waits")


@pytest.mark.parametrize(
    "algorithm",
    [a for a in ALGORITHMS if a.collective != "barrier"],
    ids=lambda a: f"{a.collective}-{a.name}",
)
def test_what_is_being_sent_does_not_change(algorithm):
    combine = np.maximum if contract(algorithm.collective).reduces else None
    for size, rank in ((n, rank) for n in (2, 3, 4, 5, 8) for rank in range(n)):
        schedule = algorithm.schedule(size)
        given, transport = lengths(schedule, 12)[rank], Alone(rank)
        if not any(given):
            continue
        send, recv = (np.zeros(n, np.int64) if n else None for n in given)
        bind(schedule, transport, Operands(send, recv), combine)()
        assert all(one.left is None for one in transport.sends)
        assert not any(one.started for one in transport.receives)
        assert [*chain(transport.sends, transport.receives)]
