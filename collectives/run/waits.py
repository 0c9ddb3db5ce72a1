"""Who waited for whom: the records of all ranks, on one clock, put together."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median, stdev
from typing import NamedTuple

from collectives.run.record import CAME, WAITED, Kept, Site


class Wait(NamedTuple):
    """A call of a rank's sample: its site and its own number, and how long it waited for whom."""

    begun: float
    ended: float
    site: int
    waited: float
    late: int
    call: int


class Ran(NamedTuple):
    """A rank's run: seconds, call sites by number, calls in the sample on rank 0's clock."""

    seconds: float
    sites: list[Site]
    kept: list[Kept]

    @property
    def whole(self) -> float:
        """Seconds of the main thread, and of others until their last calls."""
        return self.seconds + sum(site.before + site.seconds for site in self.sites if site.thread)


@dataclass
class Cost:
    """A call site on all ranks: values by rank, and in ``late`` the seconds that others waited
    there, by the rank that came last."""

    where: str
    calls: list[int]
    seconds: list[float]
    nbytes: list[int]
    before: list[float]
    waited: list[float]
    late: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    is_message: bool = False


def sampled(ranks: Sequence[Ran]) -> list[list[Wait]]:
    """The calls of each rank's sample.

    A rank waits until the last of the others has come that came before its call was over.
    """
    came: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for rank, ran in enumerate(ranks):
        for one in ran.kept:
            if one.role & CAME:
                came[one.number].append((one.begun, rank))
    for arrivals in came.values():
        arrivals.sort()
    found: list[list[Wait]] = []
    for rank, ran in enumerate(ranks):
        calls: dict[tuple[float, int], Wait] = {}
        for one in ran.kept:
            waited, late, arrivals = 0.0, rank, came[one.number]
            place = bisect_left(arrivals, (one.ended, -1)) - 1
            if place >= 0 and arrivals[place][1] == rank:
                place -= 1
            if one.role & WAITED and place >= 0 and arrivals[place][0] > one.begun:
                waited, late = arrivals[place][0] - one.begun, arrivals[place][1]
            key = one.begun, one.site
            if key not in calls or waited > calls[key].waited:  # a Waitall has many numbers
                calls[key] = Wait(one.begun, one.ended, one.site, waited, late, one.number)
        found.append(list(calls.values()))
    return found


def costs(ranks: Sequence[Ran], waits: Sequence[Sequence[Wait]]) -> list[Cost]:
    """The call sites, those with the most seconds first; a site waits for the share of its time
    that its calls in the sample do."""
    found: dict[str, Cost] = {}
    for rank, (ran, own) in enumerate(zip(ranks, waits)):
        for site in ran.sites:
            new = Cost(site.where, *([0] * len(ranks) for _ in range(5)))  # type: ignore[arg-type]
            cost = found.setdefault(site.where, new)
            for name in ("calls", "seconds", "nbytes", "before"):
                getattr(cost, name)[rank] += getattr(site, name)
        total: dict[int, float] = defaultdict(float)
        for one in own:
            total[one.site] += one.ended - one.begun
        for one in own:
            site = ran.sites[one.site]
            cost, waited = found[site.where], one.waited * site.seconds / (total[one.site] or 1.0)
            cost.waited[rank] += waited
            site.waited += waited
            cost.late[one.late] += waited
            cost.is_message |= one.call < 0
    return sorted(found.values(), key=lambda cost: -sum(cost.seconds))


def finding(ranks: Sequence[Ran], waits: Sequence[Sequence[Wait]], costs: Sequence[Cost]) -> str:
    """The first thing to know, in a sentence."""
    waited = sum(sum(cost.waited) for cost in costs)
    part = waited / (sum(ran.whole for ran in ranks) or 1.0)
    if part < 0.05:
        return f"No rank is waited for long: {part:.0%} of all time is waiting."
    worst = max(costs, key=lambda cost: sum(cost.waited))
    late = max(range(len(ranks)), key=lambda rank: worst.late.get(rank, 0.0) - worst.waited[rank])
    there = [
        (rank, one)
        for rank, (ran, own) in enumerate(zip(ranks, waits))
        for one in own
        if one.waited and ran.sites[one.site].where == worst.where
    ]
    lost = sum(cost.late.get(late, 0.0) for cost in costs)
    share = lost / sum(ran.whole for rank, ran in enumerate(ranks) if rank != late)
    own, usual = _beside(worst, worst.before, late)
    is_alike = share < 0.1 and own < 1.1 * usual  # a machine's ranks differ by as much
    if is_alike or _is_chance(there, late) or (lost < 0.5 * waited and not worst.is_message):
        return f"Ranks wait {part:.0%} of their time, for one and another, most in {worst.where}."
    if worst.is_message:
        most, _ = max(there, key=lambda two: worst.waited[two[0]] * (two[1].late == late))
        part = worst.waited[most] / ranks[most].whole
        return f"Rank {late} sends late: rank {most} waits {part:.0%} of its time in {worst.where}."
    loss = f"the others wait for it {share:.0%} of their time, most in {worst.where}."
    if usual < 0.2 * own:
        return f"Rank {late} works alone, a serial section: {loss}"
    for cost in costs:
        if cost.where.lower().removeprefix("i").startswith(("scatter", "gather")):
            continue  # the root has the blocks of all
        nbytes, typical = _beside(cost, cost.nbytes, late)
        if all(cost.calls) and typical and nbytes > 1.3 * typical:
            times = f"{nbytes / typical:.1f} times as much data"
            return f"Rank {late} has {times} as the others in {cost.where}: {loss}"
    if own > 1.1 * usual:
        return f"Rank {late} is slow, it computes {own / usual:.1f} times as long per call: {loss}"
    return f"Rank {late} comes last: {loss}"


def _is_chance(waits: Sequence[tuple[int, Wait]], late: int) -> bool:
    """Whether waits, each with its rank, are for rank ``late`` by chance.

    Then the waits for it less its own have a sum small beside the whole, or three standard errors.
    """
    found: dict[int, float] = defaultdict(float)
    for rank, one in waits:
        found[one.call] += one.waited * ((one.late == late) - (rank == late))
    swings = list(found.values())
    few = len(swings) > 1 and sum(swings) < 3 * stdev(swings) * sqrt(len(swings))
    return few or sum(swings) < 0.5 * sum(map(abs, swings))


def _beside(cost: Cost, values: Sequence[float], late: int) -> tuple[float, float]:
    """A value for each call: the late rank's, and the usual one of the others."""
    means = [value / (calls or 1) for value, calls in zip(values, cost.calls)]
    return means[late], median(mean for rank, mean in enumerate(means) if rank != late)
