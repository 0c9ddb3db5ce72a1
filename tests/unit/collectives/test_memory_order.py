"""Litmus tests: what a counter says of memory, on processors that reorder loads and stores.

The sequences are those that the flags really carry out.  Every outcome is found by trying all
executions of two memory models: of x86-64, where a load may come before an earlier store, and a
weak one that reorders whatever is of two locations and no fence parts (weaker than ARM's).
"""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pytest

from collectives.execution.transport.flags import Flag, RunCount, Tick


class Step(NamedTuple):
    """``value`` is what a store stores, and what a load must load for the execution to count."""

    kind: str
    where: str = ""
    value: int | None = None


class Rank:
    """Writes down what one rank does."""

    def __init__(self, fenced):
        self.steps = []
        self.fence = partial(self.steps.append, Step("fence")) if fenced else None

    def store(self, where, value):
        self.steps.append(Step("store", where, value))

    def load(self, where, value=None):
        self.steps.append(Step("load", where, value))

    def tick(self, where, value):
        Tick(Counter(self, where, value), 0, RunCount(), value, self.fence)()

    def wait(self, where, value):
        given = Counter(self, where, value), 0, RunCount(), value, False, lambda: None
        Flag(*given, self.fence).Wait()


class Counter:
    """In the place of the memory of a counter; a load of it sees what is waited for."""

    def __init__(self, rank, where, value):
        self.rank, self.where, self.value = rank, where, value

    def __getitem__(self, at):
        self.rank.load(self.where, self.value)
        return self.value

    def __setitem__(self, at, value):
        self.rank.store(self.where, value)


def weak(first, second):
    """Whether ``second`` has to wait for ``first``, which comes before it."""
    return "fence" in (first.kind, second.kind) or first.where == second.where


def x86(first, second):
    return weak(first, second) or (first.kind, second.kind) != ("store", "load")


def outcomes(programs, model):
    """Values of the loads that may load anything, over all executions that count."""
    found = set()

    def go(left, memory, loaded):
        if not any(left):
            found.add(tuple(value for _, value in sorted(loaded.items())))
        for rank, steps in enumerate(left):
            for at, step in enumerate(steps):
                if any(model(earlier[1], step[1]) for earlier in steps[:at]):
                    continue
                rest = [*left]
                rest[rank] = steps[:at] + steps[at + 1 :]
                number, (kind, where, value) = step
                if kind == "store":
                    go(rest, {**memory, where: value}, loaded)
                elif kind == "fence":
                    go(rest, memory, loaded)
                elif value is None:
                    go(rest, memory, {**loaded, (rank, number): memory.get(where, 0)})
                elif memory.get(where, 0) == value:
                    go(rest, memory, loaded)

    go([[*enumerate(program)] for program in programs], {}, {})
    return found


def handed_on(fenced):
    """Rank 0 stores data and says so; rank 1 waits and loads it."""
    first, second = Rank(fenced), Rank(fenced)
    first.store("data", 1)
    first.tick("told", 1)
    second.wait("told", 1)
    second.load("data")
    return [first.steps, second.steps], {(1,)}


def given_back(fenced):
    """Rank 0 loads what it may use, and says so; rank 1 waits and stores something else there."""
    first, second = Rank(fenced), Rank(fenced)
    first.load("data")
    first.tick("done", 1)
    second.wait("done", 1)
    second.store("data", 9)
    return [first.steps, second.steps], {(0,)}


def both_ways(fenced):
    """Each stores, says so, waits for the other, loads, and says that it has: a round of ours."""
    ranks = [Rank(fenced), Rank(fenced)]
    for rank, own, other in ((ranks[0], "a", "b"), (ranks[1], "b", "a")):
        rank.store(f"data {own}", 1)
        rank.tick(f"count {own}", 1)
        rank.wait(f"count {other}", 1)
        rank.load(f"data {other}")
    return [rank.steps for rank in ranks], {(1, 1)}


def through_a_third(fenced):
    """A store of rank 0 reaches rank 2, who has only heard of it from rank 1."""
    ranks = [Rank(fenced) for _ in range(3)]
    ranks[0].store("data", 1)
    ranks[0].tick("first", 1)
    ranks[1].wait("first", 1)
    ranks[1].tick("second", 1)
    ranks[2].wait("second", 1)
    ranks[2].load("data")
    return [rank.steps for rank in ranks], {(1,)}


LITMUS = [handed_on, given_back, both_ways, through_a_third]


@pytest.mark.parametrize("litmus", LITMUS)
def test_with_fences_every_processor_gives_what_is_wanted_and_without_them_x86_alone(litmus):
    programs, wanted = litmus(fenced=True)
    assert outcomes(programs, weak) == wanted
    programs, wanted = litmus(fenced=False)
    assert outcomes(programs, x86) == wanted
    assert outcomes(programs, weak) > wanted


@pytest.mark.parametrize("litmus", [handed_on, given_back, both_ways])
def test_each_fence_is_needed(litmus):
    programs, wanted = litmus(fenced=True)
    for rank, steps in enumerate(programs):
        # Two in a row, of Test and of Wait, are one.
        once = [steps[0], *(b for a, b in pairwise(steps) if a.kind != "fence" or b != a)]
        for at in [at for at, step in enumerate(once) if step.kind == "fence"]:
            without = [*programs]
            without[rank] = once[:at] + once[at + 1 :]
            assert outcomes(without, weak) > wanted


def test_the_models_know_what_is_known_of_them():
    """Store buffering, which x86-64 shows and sequential consistency does not; load buffering,
    which it does not show."""
    store = [[Step("store", one, 1), Step("load", other)] for one, other in ("xy", "yx")]
    assert (0, 0) in outcomes(store, x86)
    load = [[Step("load", one), Step("store", other, 1)] for one, other in ("xy", "yx")]
    assert (1, 1) not in outcomes(load, x86)
    assert (1, 1) in outcomes(load, weak)
