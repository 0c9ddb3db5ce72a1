"""Cost of a schedule, counted from its steps, and the number of segments that makes it fastest."""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from collectives.algorithms.segments import MOST_SEGMENTS
from collectives.compile.replay import Begin, End, Message, replay
from collectives.errors import TooLarge
from collectives.schedule import Copy, Recv, RecvReduce, Schedule, Send

#: Steps of all ranks together that are counted one by one; more would take minutes.
_MOST_STEPS = 5_000_000
#: Steps from which a number of segments is found: where ranks have so many, they have alike.
_MOST_WALKED = 1 << 16


@dataclass(frozen=True)
class Cost:
    """Counts of one schedule, in the terms of the alpha-beta-gamma model.

    Attributes:
        latency: messages in a row on the longest chain of rounds; the factor of alpha when every
            rank has as many ports as its widest round has messages.
        sent: most data sent by one rank, in units of its larger buffer; the factor of beta.
        reduced: most data reduced by one rank, in the same unit; the factor of gamma.
        copied: most data copied within one rank, in the same unit.
        messages: messages of all ranks together.
    """

    latency: int
    sent: float
    reduced: float
    copied: float
    messages: int


def count(schedule: Schedule) -> Cost:
    """Counts ``schedule``; raises :class:`ScheduleError` if it cannot run to its end."""
    size = schedule.size
    unit = 1 / (schedule.chunks * schedule.contract.blocks(size))
    clock, finish = [0] * size, [0] * size
    sent, reduced, copied = [0] * size, [0] * size, [0] * size
    messages = 0
    for event in replay(schedule):
        match event:
            case Begin(rank, _, steps):
                finish[rank] = clock[rank]
                for step in steps:
                    match step:
                        case Send(_, chunk):
                            sent[rank] += chunk.length
                        case RecvReduce(_, chunk, _):
                            reduced[rank] += chunk.length
                        case Copy(chunk, _):
                            copied[rank] += chunk.length
            case Message(sender, _, receiver, _):
                messages += 1
                moved = max(clock[sender], clock[receiver]) + 1
                finish[sender] = max(finish[sender], moved)
                finish[receiver] = max(finish[receiver], moved)
            case End(rank, _, _):
                clock[rank] = finish[rank]
    return Cost(max(clock), max(sent) * unit, max(reduced) * unit, max(copied) * unit, messages)


def expect_countable(schedule: Schedule) -> None:
    """Raises :class:`TooLarge` for a schedule whose steps would take minutes to count."""
    steps = 0
    for rank in range(schedule.size):
        for made in schedule.rounds(rank):
            steps += len(made)
            if steps > _MOST_STEPS:
                raise TooLarge(f"{schedule} has more than {_MOST_STEPS} steps, too many to count")


class Model(NamedTuple):
    """The alpha-beta-gamma model of a network.

    Attributes:
        alpha: seconds a message.
        beta: seconds a byte on the way.
        gamma: seconds a byte that is reduced.
    """

    alpha: float
    beta: float
    gamma: float


def best_segments(schedule: Schedule, nbytes: float, model: Model) -> int:
    """The number of segments that makes a schedule on chunks of ``nbytes`` fastest.

    A rank moves at most b of c chunks in a row in one direction, in a messages; k segments take
    (b + (c - b)/k) beta m + k a alpha, least at k = sqrt((c - b) beta m / (a alpha)).  For a chain
    this is Hockney's pipelining argument.  At most
    :data:`~collectives.algorithms.segments.MOST_SEGMENTS`.

    Cost: generates the schedules of the first ranks, up to 65,536 steps and all empty rounds.
    """
    row: dict[int, int] = defaultdict(int)
    busiest = messages = walked = 0
    for rank in range(schedule.size):
        if walked > _MOST_WALKED:
            break
        totals, counts = [0, 0], [0, 0]
        for number, steps in enumerate(schedule.rounds(rank)):
            walked += len(steps)
            for way, kind in enumerate((Send, Recv | RecvReduce)) if steps else ():
                lengths = [step.chunk.length for step in steps if isinstance(step, kind)]
                totals[way] += sum(lengths)
                counts[way] += len(lengths)
                row[number] = max(row[number], sum(lengths))
        busiest, messages = max((busiest, messages), *zip(totals, counts))
    if model.alpha <= 0 or not messages:
        return 1
    in_turn = sum(row.values()) - busiest
    best = (in_turn * model.beta * nbytes / (messages * model.alpha)) ** 0.5
    return max(1, round(min(MOST_SEGMENTS, best)))
