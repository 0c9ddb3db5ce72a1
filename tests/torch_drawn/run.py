"""Carries out drawn calls over both backends, and compares."""

import random
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

import tests.torch_drawn.gradients  # its kinds of calls
import tests.torch_drawn.messages  # noqa: F401
from collectives.torch import NAME
from tests.torch_drawn.calls import KINDS, drawn
from tests.torch_drawn.draw import Lying, same

#: Calls of which some are under way at the same time; groups change between two such batches.
BATCH = 10
#: Groups at one time beside that of all ranks.
GROUPS = 3


@dataclass
class Report:
    """Outcome of a run on this rank.

    Attributes:
        calls: how many of each kind.
        differences: from what must come, of our backend and on all ranks.
        gloo: calls of each kind in which Gloo raises, or has other numbers.
    """

    calls: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    gloo: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        gloo = ", ".join(f"{count} {name}" for name, count in sorted(self.gloo.items()))
        head = f"{self.calls.total()} calls of {len(self.calls)} kinds"
        return "\n".join([f"{head}; Gloo is otherwise in {gloo or 'none'}", *self.differences])


@dataclass(eq=False)  # else two groups of the same ranks are one on ranks that are no members
class Group:
    """A group of some ranks over both backends; on ranks that are no members, torch's marks."""

    ranks: list[int]
    ours: Any
    gloo: Any


def run_drawn(
    seed: int, calls: int, first: int = 0, kinds: list[str] | None = None, gloo: bool = True
) -> Report:
    """Carries out calls; collective over torch's group of all ranks, which is ours.

    It ends on all ranks after the batch that has the first difference.  ``gloo``: makes the calls
    over Gloo, too, some of which wait for ever after some hundreds; the sums by hand are compared
    in any case.
    """
    report, rank, size = Report(), dist.get_rank(), dist.get_world_size()
    groups = [Group(list(range(size)), dist.group.WORLD, dist.new_group(backend="gloo"))]
    for begin in range(first, first + calls, BATCH):
        rng = random.Random(f"{seed} {begin} groups")
        _change(groups, rng, size)
        batch = []
        for number in range(begin, begin + BATCH):
            group, name = rng.choice([groups[0], *groups]), rng.choice(kinds or [*KINDS])
            if rank in group.ranks and (one := drawn(name, seed, number, group.ranks, rank)):
                batch.append((group, name, *one))
                report.calls[name] += 1
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            _of_gloo(batch if gloo else [], report)
            found = _of_ours(batch, random.Random(f"{seed} {begin} of {rank}"))
        if any(MPI.COMM_WORLD.allgather(found)):
            report.differences = [
                f"rank {r}: {one}"
                for r, few in enumerate(MPI.COMM_WORLD.allgather(found))
                for one in few
            ]
            break
    for group in groups:
        _end(group, rank)
    return report


def _change(groups: list[Group], rng: random.Random, size: int) -> None:
    """Ends some groups and makes others; the same on all ranks."""
    rank = dist.get_rank()
    rng.shuffle(rest := groups[1:])
    while rest and (len(rest) >= GROUPS or rng.random() < 0.2):
        _end(gone := rest.pop(), rank)
        groups.remove(gone)
    if rng.random() < 0.5 and len(groups) <= GROUPS:
        ranks = sorted(rng.sample(range(size), rng.randint(1, size)))
        ours = dist.new_group(ranks, backend=NAME)
        groups.append(Group(ranks, ours, dist.new_group(ranks, backend="gloo")))


def _end(group: Group, rank: int) -> None:
    if rank in group.ranks:
        dist.destroy_process_group(group.gloo)
        if group.ours is not dist.group.WORLD:
            dist.destroy_process_group(group.ours)


def _of_gloo(batch: list[Any], report: Report) -> None:
    for group, name, draw, call, expected in batch:
        if not draw.with_gloo:
            continue
        try:
            results, works = call(group.gloo, Lying(None))
            _wait(works)
            is_same = expected is not None and all(map(same, results, expected))
        except Exception:
            is_same = expected is None
        if not is_same:
            report.gloo[name] += 1


def _of_ours(batch: list[Any], rng: random.Random) -> list[str]:
    """Begins the calls in order, and waits in an order of this rank's own.

    Returns:
        Differences, in words.
    """
    found, pending = [], []
    for group, name, draw, call, expected in batch:
        lying = Lying(draw.of(draw.me + 1000))
        where = f"call {draw.number}, {name} in group {group.ranks}"
        try:
            results, works = call(group.ours, lying)
        except Exception as error:
            if expected is not None:
                found.append(f"{where}: {error!r}")
                # The others may wait for ever.
                print(f"rank {dist.get_rank()}: {found[-1]}", file=sys.__stderr__, flush=True)
            continue
        pending.append((where, lying, results, works, expected))
        if not works or rng.random() < 0.3:
            found += _ended(*pending.pop())
    rng.shuffle(pending)
    for each in pending:
        found += _ended(*each)
    return found


def _ended(where: str, lying: Lying, results: Any, works: Any, expected: Any) -> list[str]:
    try:
        _wait(works)
    except Exception as error:
        return [] if expected is None else [f"{where}: {error!r}"]
    if expected is None:
        return [f"{where}: it raises nothing"]
    found = [
        f"{where}: {one} came in the place of {other}"
        for one, other in zip(results, expected, strict=True)
        if not same(one, other)
    ]
    return found if lying.is_whole() else [*found, f"{where}: it wrote beside its tensors"]


def _wait(works: Any) -> None:
    for work in works if isinstance(works, list) else [works]:
        if work is not None:
            work.wait()
