"""Simulator of a schedule's time on a model of a network, for any number of ranks.

A message takes ``alpha`` and then its bytes at the rate of the slowest link on its way, where the
messages of a round share a link evenly.  It begins when both of its ranks have ended their round
before (rendezvous), and a round ends with the last of its messages and its reductions.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from collectives.analysis.topology import Ranks, Topology
from collectives.errors import ScheduleError, TooLarge
from collectives.schedule import Copy, Recv, Round, Schedule, Send

#: Steps of all ranks together that are simulated one by one; more would take minutes.
MOST_STEPS = 12_000_000

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Machine:
    """A network and the speed of a rank's reductions.

    Attributes:
        gamma: seconds a byte of a reduction.
        ports: ``"one"``: a rank's messages of a round follow one another; ``"multi"``: each has a
            port of its own.
    """

    topology: Topology
    gamma: float = 1 / 100e9
    ports: str = "one"


def simulate(schedule: Schedule, nbytes: int, machine: Machine, uniform: bool = False) -> float:
    """Seconds until the last rank is done with buffers of ``nbytes`` (the larger one).

    Cost: a step of Python for each step of the schedule; 65,536 ranks of a logarithmic algorithm
    take seconds.

    Args:
        uniform: in each round, all ranks move as many bytes over the same distances (a ring); then
            rounds alike are simulated once, and the work of rank 0 stands for every rank's, unless
            rounds differ whose messages end at several times.

    Raises:
        ScheduleError: if the ends of a message lie in rounds of different numbers.
        TooLarge: if there are too many steps; of uniform rounds, of rank 0.
    """
    size = schedule.size
    cut = Cut(nbytes // schedule.contract.blocks(size), schedule.chunks)
    rounds = list(schedule.rounds(0))
    if uniform and (seconds := _alike(rounds, size, cut, machine)) is not None:
        return seconds
    # A round without steps takes a tenth of one; in a chain, one of its ends has most rounds.
    longest = max(len(rounds), sum(1 for _ in schedule.rounds(size - 1)))
    if (every := size * max(sum(map(len, rounds)), longest // 10)) > MOST_STEPS:
        raise TooLarge(f"{schedule} has too many steps to simulate: {every}")
    clock = np.zeros(size)
    together = zip_longest(*(schedule.rounds(rank) for rank in range(size)), fillvalue=())
    with _no_garbage_collection():
        for steps in together:
            if not _advance(clock, steps, cut, machine):
                raise ScheduleError(
                    f"{schedule}: it cannot be simulated, as some messages leave in a round of "
                    "another number than they arrive in; let ranks that have nothing to do yield "
                    "empty rounds until then"
                )
    return float(clock.max())


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pauses the collector: millions of steps are made, and none is part of a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Cut:
    """Blocks of ``count`` bytes cut into ``chunks``: :class:`Layout` for arrays of chunks."""

    count: int
    chunks: int

    def offsets(self, i: Ranks) -> Ranks:
        """Where chunks begin."""
        block, piece = np.divmod(i, self.chunks)
        length, longer = divmod(self.count, self.chunks)
        return block * self.count + piece * length + np.minimum(piece, longer)


def _advance(clock: Seconds, rounds: tuple[Round, ...], cut: Cut, machine: Machine) -> bool:
    """Advances ``clock`` by one round of all ranks; returns whether all sent messages arrive.

    The loop is plain for speed, as it visits every step of every rank.
    """
    messages: list[tuple[int, int, int, int]] = []  # source, target, first and last chunk
    arriving: list[tuple[int, int]] = []  # source, target
    local: list[tuple[int, int, int]] = []  # rank, first and last chunk
    for rank, steps in enumerate(rounds):
        for step in steps:
            if isinstance(step, Send):
                _, first, last = step.chunk
                messages.append((rank, step.peer, first, last))
                continue
            if not isinstance(step, Copy):
                arriving.append((step.peer, rank))
            if not isinstance(step, Recv):
                _, first, last = step.chunk
                local.append((rank, first, last))
    if messages:
        source, target, first, last = np.array(messages).T
        nbytes = (cut.offsets(last) - cut.offsets(first)).astype(float)
        ends = _ends(clock, source, target, nbytes, machine)
        np.maximum.at(clock, source, ends)
        np.maximum.at(clock, target, ends)
    if local:
        rank, first, last = np.array(local).T
        work = (cut.offsets(last) - cut.offsets(first)) * machine.gamma
        clock += np.bincount(rank, work, minlength=len(clock))
    sent = [source * len(clock) + target for source, target, _, _ in messages]
    received = [source * len(clock) + target for source, target in arriving]
    return np.array_equal(np.sort(sent), np.sort(received))


def _alike(rounds: Sequence[Round], size: int, cut: Cut, machine: Machine) -> float | None:
    """Seconds of rank 0's ``rounds``, where all ranks are alike; None if they do not stay so."""
    worked = [s.chunk[1:] for steps in rounds for s in steps if not isinstance(s, Send | Recv)]
    lengths = np.diff(cut.offsets(np.array(worked, int).reshape(-1, 2)))
    seconds = machine.gamma * float(lengths.sum())
    sent = (
        tuple((s.peer, s.chunk.length) for s in steps if isinstance(s, Send)) for steps in rounds
    )
    talks = Counter(filter(None, sent))
    if size * max(map(len, talks), default=0) > MOST_STEPS:
        return None
    for talk, times in talks.items():
        peers, lengths = np.array(talk).T
        source = np.repeat(np.arange(size, dtype=np.int64), len(peers))
        target = (source + np.tile(peers, size)) % size
        nbytes = np.tile(cut.offsets(lengths), size).astype(float)
        ends = _ends(np.zeros(size), source, target, nbytes, machine)
        if len(talks) > 1 and np.ptp(ends):
            return None
        seconds += times * float(ends.max())
    return seconds


def _ends(
    clock: Seconds,
    source: npt.NDArray[np.int64],
    target: npt.NDArray[np.int64],
    nbytes: Seconds,
    machine: Machine,
) -> Seconds:
    """When each message of a round has arrived."""
    network = machine.topology
    beta = network.beta(source, target)
    latency = network.alpha(source, target)
    moving = nbytes * beta
    if machine.ports == "one":
        for end in (source, target):
            moving = np.maximum(moving, np.bincount(end, nbytes * beta)[end])
        most = np.maximum(np.bincount(source)[source], np.bincount(target)[target])
        latency = latency * most
    for links, seconds in network.shared(source, target):
        used = links >= 0
        carried = np.broadcast_to(nbytes, links.shape)[used]
        load = np.bincount(links[used], carried, minlength=1) * seconds
        slowest = np.where(used, load[np.maximum(links, 0)], 0.0).max(axis=0)
        moving = np.maximum(moving, slowest)
    return np.maximum(clock[source], clock[target]) + latency + moving
