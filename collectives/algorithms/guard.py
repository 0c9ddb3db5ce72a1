"""Checks around a program's own algorithm, whose functions may return or raise anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import cast

import numpy as np

from collectives.algorithms.algorithm import Algorithm, Option
from collectives.contracts import contract
from collectives.errors import CollectiveError, ScheduleError, words
from collectives.schedule import Chunk, Copy, Round, Schedule, Step, recvbuf, sendbuf, workspace

#: Most rounds of a rank and most chunks of a block, unless 100 for each rank are more: a generator
#: that yields more does not end, and a proof of more chunks takes too long.
_MOST = 10_000
_BUFFERS = (sendbuf.name, recvbuf.name, workspace.name)
#: Marks the end of a generator, which may yield anything, ``None`` too.
_END = object()


def guarded(algorithm: Algorithm, size: int, root: int = 0, **options: Option) -> Schedule:
    """The schedule of ``algorithm``; errors say which rank and round is wrong.

    Raises:
        ScheduleError: a function raised, now or while rounds are generated, or returned what is no
            schedule or round; or the rounds do not end.
        UnknownAlgorithm: the functions raise it for a size or option that they do not support.
    """
    where = f"{algorithm.collective} {algorithm.name} on {size} ranks"
    with _said(where):
        schedule = algorithm.schedule(size, root, **options)
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"{where}: compose gave {schedule!r}, not a Schedule")
    most = _most(size)
    # Each rank may need workspace for a block of every rank.
    for what, value, least, limit in (
        ("chunks", schedule.chunks, 1, most),
        ("workspace", schedule.workspace, 0, most * size),
    ):
        if type(value) is not int or value < least:
            raise ScheduleError(f"{where}: {what} is {value!r}, not a number from {least} on")
        if value > limit:
            raise ScheduleError(
                f"{where}: {what} is {value}, more than the {limit} that are proved"
            )
    if (schedule.collective, schedule.size) != (algorithm.collective, size):
        raise ScheduleError(f"{where}: compose gave a schedule of {schedule}")
    if contract(schedule.collective).rooted and schedule.root != root:
        raise ScheduleError(f"{where}: compose gave a schedule of root {schedule.root}, not {root}")
    return replace(schedule, generate=lambda rank: _guarded(schedule, rank))


def _guarded(schedule: Schedule, rank: int) -> Iterator[Round]:
    most = _most(schedule.size)
    rounds: Iterator[Round] | None = None
    for number in count():
        where = f"{schedule}: rank {rank} round {number}"
        with _said(where):
            rounds = rounds or iter(schedule.generate(rank))
            steps = next(rounds, _END)
        if steps is _END:
            return
        if number == most:
            raise ScheduleError(f"{where}: the generator has not ended after {most} rounds")
        if why := flaw(steps):
            raise ScheduleError(f"{where}: {why}")
        yield cast(Round, steps)


@contextmanager
def _said(where: str) -> Iterator[None]:
    """Makes an error of the program's own a :class:`ScheduleError` that says where it came up."""
    try:
        yield
    except CollectiveError:
        raise
    except (Exception, SystemExit) as error:
        raise ScheduleError(f"{where}: {words(error)}") from error


def _most(size: int) -> int:
    return max(_MOST, 100 * size)


def flaw(steps: object) -> str:
    """Why ``steps`` is no round, by its types alone; empty if it is one."""
    if type(steps) is not tuple or not all(isinstance(step, Step) for step in steps):
        return f"{steps} is not a round: yield a tuple of steps"
    for step in steps:
        peers: tuple[object, ...] = () if isinstance(step, Copy) else (step.peer,)
        named = [part for part in tuple(step)[len(peers) :] if part is not None]
        chunks = [c for c in named if isinstance(c, Chunk) and c.buffer in _BUFFERS]
        if chunks != named:
            return f"{tuple(step)} names what is no chunk of sendbuf, recvbuf or workspace"
        numbers = [*peers, *(n for chunk in chunks for n in chunk[1:])]
        if not all(isinstance(n, int | np.integer) for n in numbers):
            return f"{tuple(step)} has a peer or chunk that is no whole number"
    return ""
