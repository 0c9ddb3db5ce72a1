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
    """A call: when it began and ended, its site's number, seconds that it waited, for which rank,
    in which call of all."""

    begun: float
    ended: float
    site: int
    waited: float
    late: int
    number: int


class Ran(NamedTuple):
    """A rank's run: seconds, call sites by number, calls in the sample on rank 0's clock."""

    seconds: float
    sites: list[Site]
    kept: list[Kept]


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
            waited = one.waited * site.seconds / (total[one.site] or 1.0)
            found[site.where].waited[rank] += waited
            found[site.where].late[one.late] += waited
            found[site.where].is_message |= one.number < 0
    return sorted(found.values(), key=lambda cost: -sum(cost.seconds))


def finding(ranks: Sequence[Ran], waits: Sequence[Sequence[Wait]], costs: Sequence[Cost]) -> str:
    """The first thing to know, in a sentence."""
    total = sum(ran.seconds for ran in ranks) or 1.0
    waited = sum(sum(cost.waited) for cost in costs)
    if waited < 0.05 * total:
        return f"No rank is waited for long: {waited / total:.0%} of all time is waiting."
    worst = max(costs, key=lambda cost: sum(cost.waited))
    numbers = range(len(ranks))
    late = max(numbers, key=lambda rank: worst.late.get(rank, 0.0) - worst.waited[rank])
    there = [
        (rank, one)
        for rank, (ran, own) in enumerate(zip(ranks, waits))
        for one in own
        if one.waited and ran.sites[one.site].where == worst.where
    ]
    lost = sum(cost.late.get(late, 0.0) for cost in costs)
    if _is_chance(there, late) or (lost < 0.5 * waited and not worst.is_message):
        part = waited / total
        return f"Ranks wait {part:.0%} of their time, for one and another, most in {worst.where}."
    if worst.is_message:
        suffers: dict[int, float] = defaultdict(float)
        for rank, one in there:
            suffers[rank] += one.waited * (one.late == late)
        most = max(numbers, key=lambda rank: suffers[rank])
        part = worst.waited[most] / ranks[most].seconds
        return f"Rank {late} sends late: rank {most} waits {part:.0%} of its time in {worst.where}."
    share = lost / sum(ran.seconds for rank, ran in enumerate(ranks) if rank != late)
    loss = f"the others wait for it {share:.0%} of their time, most in {worst.where}."
    own, usual = _beside(worst, worst.before, late)
    if usual < 0.2 * own:
        return f"Rank {late} works alone, a serial section: {loss}"
    for cost in costs:
        nbytes, typical = _beside(cost, cost.nbytes, late)
        if all(cost.calls) and typical and nbytes > 1.3 * typical:
            times = f"{nbytes / typical:.1f} times as much data"
            return f"Rank {late} has {times} as the others in {cost.where}: {loss}"
    if own > 1.1 * usual:
        return f"Rank {late} is slow, it computes {own / usual:.1f} times as long: {loss}"
    return f"Rank {late} comes last: {loss}"


def _is_chance(waits: Sequence[tuple[int, Wait]], late: int) -> bool:
    """Whether a rank lets others wait by chance, as a machine's noise does.

    By chance it waits as much itself.  So the others' waits for it less its own, call by call, have
    a mean that is small beside their absolute values, or beside three of its standard errors: that
    is so after a single long pause, too.

    Args:
        waits: those of a site, each with its rank.
    """
    found: dict[int, float] = defaultdict(float)
    for rank, one in waits:
        found[one.number] += one.waited * ((one.late == late) - (rank == late))
    swings = list(found.values())
    whole, calls = sum(swings), len(swings)
    small = whole < 0.5 * sum(map(abs, swings))
    return small or (calls > 1 and whole < 3 * stdev(swings) * sqrt(calls))


def _beside(cost: Cost, values: Sequence[float], late: int) -> tuple[float, float]:
    """A value for each call: the late rank's, and the usual one of the others."""
    means = [value / (calls or 1) for value, calls in zip(values, cost.calls)]
    return means[late], median(mean for rank, mean in enumerate(means) if rank != late)
