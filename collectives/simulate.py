"""Runs a schedule in time on a model of a network, at sizes that nobody has at hand.

A message takes ``alpha`` and then its bytes at the rate of the slowest link on its way, where the
messages of a round share a link evenly.  It begins when both of its ranks have ended their round
before (rendezvous), and a round ends with the last of its messages and its reductions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from collectives.errors import TooLarge
from collectives.executor import Layout
from collectives.schedule import Chunk, Copy, RecvReduce, Round, Schedule, Send
from collectives.topology import Topology

#: Steps of all ranks together that are simulated one by one; more would take minutes.
MOST_STEPS = 12_000_000
#: Of a schedule whose rounds are all alike, as many stand for the rest.
SAMPLE = 4

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Machine:
    """A network and what a rank does to its own memory.

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
        uniform: every round moves the same number of bytes to the same distance (a ring); then a
            few rounds stand for all where there are too many.

    Raises:
        TooLarge: if there are too many rounds and they are not uniform.
    """
    size = schedule.size
    blocks = schedule.contract.blocks(size)
    room = max(blocks, -(-schedule.workspace // schedule.chunks))
    layout = Layout.even(nbytes // blocks, room, schedule.chunks)
    clock = np.zeros(size)
    lengths = [len(steps) for steps in schedule.rounds(0)]
    sampled = size * sum(lengths) > MOST_STEPS
    if sampled and not uniform:
        raise TooLarge(f"{schedule} has too many steps to simulate: {size * sum(lengths)}")
    for number, steps in enumerate(_together(schedule)):
        if sampled and number == SAMPLE:
            return float(clock.max()) * len(lengths) / SAMPLE
        _advance(clock, steps, layout, machine)
    return float(clock.max())


def _together(schedule: Schedule) -> Iterator[tuple[Round, ...]]:
    """The rounds of the same number of all ranks."""
    return zip_longest(*(schedule.rounds(r) for r in range(schedule.size)), fillvalue=())


def _advance(clock: Seconds, rounds: tuple[Round, ...], layout: Layout, machine: Machine) -> None:
    source, target, nbytes = [], [], []
    local = np.zeros(len(clock))
    for rank, steps in enumerate(rounds):
        for step in steps:
            match step:
                case Send(peer, chunk):
                    source.append(rank)
                    target.append(peer)
                    nbytes.append(_length(layout, chunk))
                case RecvReduce(_, chunk, _) | Copy(chunk, _):
                    local[rank] += _length(layout, chunk) * machine.gamma
    if source:
        messages = np.array(source), np.array(target), np.array(nbytes, dtype=float)
        ends = _ends(clock, *messages, machine)
        np.maximum.at(clock, messages[0], ends)
        np.maximum.at(clock, messages[1], ends)
    clock += local


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


def _length(layout: Layout, chunk: Chunk) -> int:
    return layout.offset(chunk.stop) - layout.offset(chunk.start)
