"""Cost of a schedule, counted from its steps: messages in a row, bytes sent, bytes reduced."""

from dataclasses import dataclass

from collectives.analysis.replay import Begin, End, Message, replay
from collectives.errors import TooLarge
from collectives.schedule import Copy, RecvReduce, Schedule, Send

#: Most ranks of a job.
MOST_RANKS = 1 << 20
#: Steps of all ranks together that are counted one by one; more would take minutes.
_MOST_STEPS = 5_000_000


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
