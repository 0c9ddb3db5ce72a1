"""No two ranks of a plan in shared memory touch the same bytes in an order that is left open.

A proof for each schedule, by vector clocks: what a rank has done before it says so has been done
for whoever has waited for that word.  Orders that no run would ever take count as well.
"""

import random
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest

from collectives.algorithms import build
from collectives.execution.memory import HostMemory
from collectives.execution.plan import Binding
from collectives.schedule import Copy, Recv, RecvReduce, Schedule, Send, recvbuf, sendbuf
from tests.local.shared_ranks import LENDS_AND_WRITES, Layout, Node, in_shared_memory, in_two

RUNS = 2


class Word(NamedTuple):
    """A rank has come so far; called: it says so."""

    rank: int
    value: int

    def Wait(self):
        raise AssertionError("nothing runs here")

    Test = __call__ = Wait


class Touch(NamedTuple):
    """Memory that a call reads and stores to."""

    read: tuple[np.ndarray, ...]
    stored: tuple[np.ndarray, ...]

    def __call__(self):
        raise AssertionError("nothing runs here")


class Untouched(HostMemory):
    """Memory whose calls only say what they would touch."""

    @staticmethod
    def borrowed(items):
        return items

    @staticmethod
    def reduction(combine, left, right, out):
        return Touch((left, right), (out,))

    @staticmethod
    def combine(function):
        return function


class SayingNode(Node):
    """With words in the place of counters."""

    def tick(self, slot, value):
        return Word(self.rank, value)

    def flag(self, rank, slot, value):
        return Word(rank, value)


def programs(schedule, in_place, met=False):
    """Each rank's words, waits and touches in one run; its caller touches all around it."""
    layout, size = Layout(schedule, in_place), schedule.size
    for rank in range(size):
        plan = layout.bind(SayingNode(rank, layout.buffers), Binding(memory=Untouched(), met=met))
        callers = Touch((), tuple(layout.buffers[rank]))
        calls = [call for bound in plan.rounds for call in (*bound.starts, *bound.finish)]
        meeting = [Word(rank, 0), *((Word(r, 0), "waited for") for r in range(size))] if met else []
        yield [callers, *meeting, *filter(None, map(event, calls)), callers]


def event(call):
    """Event of a plan's call: a word that is said, one that is waited for, or what is touched."""
    if isinstance(call, Word | Touch):
        return call
    if isinstance(waited := getattr(call, "__self__", None), Word):
        return waited, "waited for"
    if getattr(call, "func", None) is HostMemory.copy:
        target, source = call.args
        if HostMemory.address(target) == HostMemory.address(source):
            return None  # NumPy leaves it alone: in place, a rank's own block is where it belongs
        return Touch((source,), (target,))
    return None


def clocks(ranks):
    """Yields each touch of ``RUNS`` runs with its rank, and how far that knows all ranks to be."""
    last = 2 + max(event.value for program in ranks for event in program if isinstance(event, Word))
    left = [[(run, event) for run in range(RUNS) for event in program][::-1] for program in ranks]
    known = [[0] * len(ranks) for _ in ranks]
    said = [[] for _ in ranks]
    while any(left):
        moved = False
        for rank, events in enumerate(left):
            while events:
                run, event = events[-1]
                known[rank][rank] += 1
                if isinstance(event, Touch):
                    yield event, rank, tuple(known[rank])
                elif isinstance(event, Word):
                    said[rank].append((run * last + event.value, tuple(known[rank])))
                else:
                    word, _ = event
                    wanted = run * last + word.value
                    then = next(
                        (clock for value, clock in said[word.rank] if value >= wanted), None
                    )
                    if then is None:
                        break
                    known[rank] = [*map(max, known[rank], then)]
                events.pop()
                moved = True
        assert moved, "ranks wait for ever"


def races(ranks):
    """Pairs of touches of the same bytes, of which one stores, in an order that is left open."""
    parts = []
    for touch, rank, clock in clocks(ranks):
        for items, stores in (
            *((a, False) for a in touch.read),
            *((a, True) for a in touch.stored),
        ):
            start = HostMemory.address(items)
            parts.append((start, start + items.nbytes, stores, rank, clock))
    for one, other in combinations(parts, 2):
        (a, b, stores, rank, clock), (c, d, stores_too, rank_too, clock_too) = one, other
        if rank == rank_too or not (stores or stores_too) or b <= c or d <= a:
            continue
        if clock[rank] > clock_too[rank] and clock_too[rank_too] > clock[rank_too]:
            yield one, other


@pytest.mark.parametrize(("schedule", "in_place"), list(in_shared_memory()))
def test_there_is_none(schedule, in_place, monkeypatch):
    for met in (False, True):
        assert not any(races(list(programs(schedule, in_place, met))))
    in_two(monkeypatch, schedule)
    for met in (False, True):
        assert not any(races(list(programs(schedule, in_place, met))))


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_each_wait_of_the_direct_all_reduce_is_needed(size, in_place, met):
    ranks = list(programs(build("allreduce", "direct", size), in_place, met))
    assert not any(races(ranks))
    for rank, program in enumerate(ranks):
        for i, one in enumerate(program):
            if not isinstance(one, Word | Touch) and one[0].value:
                without = [*ranks[:rank], program[:i] + program[i + 1 :], *ranks[rank + 1 :]]
                assert any(races(without)), f"rank {rank} need not wait for {one}"


def drawn(draw, size):
    """Rounds in which any rank sends anything to any other, so that no rank uses a chunk twice in
    a round, but to reduce into what it sends."""
    chunks, programs = 3, [[] for _ in range(size)]
    for _ in range(draw.randint(1, 4)):
        steps = [[] for _ in range(size)]
        used = [set() for _ in range(size)]
        for _ in range(draw.randint(1, 2 * size)):
            sender, receiver = draw.sample(range(size), 2)
            sent, target = draw.randrange(chunks), draw.randrange(chunks)
            kind = draw.choice([Recv, RecvReduce])
            barred = {("stored", target)} | ({("sent", target)} if kind is Recv else set())
            if ("stored", sent) in used[sender] or barred & used[receiver]:
                continue
            used[sender].add(("sent", sent))
            used[receiver].add(("stored", target))
            steps[sender].append(Send(receiver, recvbuf[sent]))
            steps[receiver].append(kind(sender, recvbuf[target]))
        for rank in range(size):
            free = [c for c in range(chunks) if not {("stored", c), ("sent", c)} & used[rank]]
            if free and draw.random() < 0.3:
                steps[rank].append(Copy(recvbuf[free[0]], sendbuf[draw.randrange(chunks)]))
            programs[rank].append(tuple(steps[rank]))
    return Schedule("allreduce", "drawn", size, chunks, 0, True, lambda rank: iter(programs[rank]))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_there_is_none_in_drawn_rounds(size):
    for seed in range(150):
        schedule = drawn(random.Random(seed), size)
        assert not any(races(list(programs(schedule, False)))), f"seed {seed}"


def test_there_is_none_where_a_rank_writes_over_what_it_lends():
    assert not any(races(list(programs(LENDS_AND_WRITES, False))))
