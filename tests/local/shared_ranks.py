"""Ranks of a plan in shared memory that are all in this process."""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest

from collectives.algorithms import ALGORITHMS
from collectives.contracts import contract
from collectives.errors import UnknownAlgorithm
from collectives.execution import shared
from collectives.execution.pieces import PieceMessage
from collectives.execution.transport.flags import Flag, RunCount, Tick
from collectives.execution.transport.windows import Place
from collectives.schedule import Copy, Recv, RecvReduce, Schedule, Send, recvbuf, sendbuf
from tests.local.references import lengths

SEND, RECV = Place(0, 0), Place(1, 0)
#: Items of a block.
COUNT = 12


class Node:
    """The memory of a node as one of its ranks has it."""

    def __init__(self, rank, buffers):
        self.rank, self.size, self.buffers = rank, len(buffers), buffers

    def advance(self, slot, ticks):
        return lambda: None

    def view(self, rank, place, count, dtype):
        return self.buffers[rank][place.window][:count]


class CountingNode(Node):
    """With real counters: ``counters[rank]``, of which each slot has one."""

    def __init__(self, rank, buffers, counters):
        super().__init__(rank, buffers)
        self.counters, self.runs = counters, defaultdict(RunCount)

    def advance(self, slot, ticks):
        return lambda: self.runs[slot].advance(ticks)

    def tick(self, slot, value):
        return Tick(self.counters[self.rank], slot, self.runs[slot], value)

    def flag(self, rank, slot, value, runs=None):
        given = self.counters[rank], slot, runs or self.runs[slot], value
        return Flag(*given, False, lambda: None)


class Layout:
    """Buffers of all ranks; ``first``: blocks of ``recvbuf`` in which inputs lie in place."""

    def __init__(self, schedule, in_place):
        blocks, self.schedule = schedule.contract, schedule
        self.sent, received = zip(*lengths(schedule, COUNT))
        members = [schedule.member(rank)._replace(chunks=1) for rank in range(schedule.size)]
        self.first = [
            blocks.place(m) if in_place and n else None for m, n in zip(members, received)
        ]
        self.buffers = [[np.zeros(n) for n in own] for own in zip(self.sent, received)]
        self.places = tuple(
            (SEND if sent and first is None else None, RECV if n else None)
            for sent, first, n in zip(self.sent, self.first, received)
        )

    def bind(self, node, binding):
        combine = np.maximum if self.schedule.contract.idempotent else np.add
        return shared.bind_shared(
            self.schedule, node, self.places, COUNT, np.dtype(float), combine, binding
        )


def steps_of(plan):
    """Makes the calls of a plan; yields before each that waits, while it does, and after each."""
    for bound in plan.rounds:
        for call in (*bound.starts, *bound.finish):
            flag = getattr(call, "__self__", None)
            while isinstance(flag, (Flag, PieceMessage)) and not flag.Test():
                yield False
            call()
            yield True


def interleave(runs, choose, told):
    """Goes on with the ranks' ``runs``, generators by rank that yield whether they have made a call
    or wait; ``choose`` says who is tried first, and who next."""
    while runs:
        for rank in choose([*runs]):
            moved = next(runs[rank], None)
            if moved is None:
                del runs[rank]
            if moved is not False:
                break
        else:
            pytest.fail(f"{told}: ranks {[*runs]} wait for ever")


def in_two(monkeypatch, schedule):
    """From now on, each block is cut into two segments."""
    for limit in ("SEGMENT_BYTES", "COPIED_BYTES"):
        monkeypatch.setattr(shared, limit, 4 * -(-COUNT // schedule.chunks))


def in_shared_memory(*quick):
    """Every algorithm there, in place and not, on 2 to 5 ranks, of which some are quick, or all."""
    for algorithm in ALGORITHMS:
        where = (False, True) if contract(algorithm.collective).in_place is not None else (False,)
        for in_place, size in product(where, (2, 3, 4, 5)):
            schedule = algorithm.schedule(size)
            runs = (algorithm.in_place or not in_place) and not schedule.workspace
            if runs and algorithm.collective != "barrier":
                name = f"{algorithm.collective}-{algorithm.name}-{in_place}-{size}"
                marks = () if size in (quick or (size,)) else pytest.mark.slow
                yield pytest.param(schedule, in_place, marks=marks, id=name)


def _lends_and_writes(rank):
    copied = (Copy(recvbuf[0], sendbuf[0]),)
    summed = (RecvReduce(0, recvbuf[0]),)
    return iter(
        [
            [copied, (), (Send(1, recvbuf[0]), Send(2, recvbuf[0]))],
            [copied, (Send(2, recvbuf[0]),), summed],
            [copied, (RecvReduce(1, recvbuf[0]),), summed],
        ][rank]
    )


#: A scan on 3 ranks, whose rank 1 writes over what rank 2 reads a round before.
LENDS_AND_WRITES = Schedule("scan", "by_hand", 3, 1, 0, True, _lends_and_writes)


def reduces_in_turn(rank, size):
    """An all-reduce in 2 chunks, whose rank 0 sums into both, as it sends one, and then into the
    other again; for 3 ranks."""
    if size != 3:
        raise UnknownAlgorithm("it is for 3 ranks")
    both, first, second = recvbuf[0:2], recvbuf[0], recvbuf[1]
    yield (Copy(both, sendbuf[0:2]),)
    yield (
        (Send(1, second), RecvReduce(1, both, sendbuf[0:2]), RecvReduce(2, first)),
        (Send(0, both), RecvReduce(0, second)),
        (Send(0, first),),
    )[rank]
    yield ((), (RecvReduce(2, second),), (Send(1, second),))[rank]
    yield (
        (Send(1, first), Send(2, first), Recv(1, second)),
        (Send(0, second), Send(2, second), Recv(0, first)),
        (Recv(0, first), Recv(1, second)),
    )[rank]
