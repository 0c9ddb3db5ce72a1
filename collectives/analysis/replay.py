"""Replays a schedule on all ranks at once, in one process, under rendezvous semantics.

A message moves when both of its ends have been reached, and a rank leaves a round when all of its
messages have moved: the least that MPI promises.  A schedule that deadlocks here may deadlock on a
cluster.  Messages from one rank to another match in the order in which they were posted.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from collectives.errors import ScheduleError
from collectives.schedule import Copy, Recv, RecvReduce, Round, Schedule, Send


class Begin(NamedTuple):
    """``rank`` enters its round ``number``."""

    rank: int
    number: int
    steps: Round


class Message(NamedTuple):
    """The ``Send`` at ``sender``'s ``position`` in its round meets a receive."""

    sender: int
    send_position: int
    receiver: int
    recv_position: int


class End(NamedTuple):
    """``rank`` has completed its round ``number``."""

    rank: int
    number: int
    steps: Round


Event = Begin | Message | End


def replay(schedule: Schedule) -> Iterator[Event]:
    """Yields the events of one run, in an order in which they can happen.

    Raises:
        ScheduleError: if a step names a rank that does not exist, or if ranks wait for ever; the
            message says which rank waits in which round, and for what.
    """
    programs = [schedule.rounds(rank) for rank in range(schedule.size)]
    current: list[tuple[int, Round]] = [(-1, ())] * schedule.size
    outstanding: list[set[int]] = [set() for _ in programs]
    sends: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
    recvs: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
    finished = [False] * schedule.size
    runnable = deque(range(schedule.size))

    def completed(rank: int, position: int) -> Iterator[End]:
        outstanding[rank].discard(position)
        if not outstanding[rank]:
            yield End(rank, *current[rank])
            runnable.append(rank)

    while runnable:
        rank = runnable.popleft()
        following = next(programs[rank], None)
        if following is None:
            finished[rank] = True
            continue
        number = current[rank][0] + 1
        current[rank] = (number, following)
        yield Begin(rank, number, following)
        outstanding[rank] = {i for i, step in enumerate(following) if not isinstance(step, Copy)}
        if not outstanding[rank]:
            yield End(rank, number, following)
            runnable.append(rank)
            continue
        for position, step in enumerate(following):
            if isinstance(step, Copy):
                continue
            if not 0 <= step.peer < schedule.size or step.peer == rank:
                raise ScheduleError(
                    f"{schedule}: rank {rank} round {number}: {step} names rank {step.peer}, "
                    f"which is {'the rank itself' if step.peer == rank else 'no rank'}"
                )
            if isinstance(step, Send):
                waiting, posted, pair = recvs, sends, (rank, step.peer)
            else:
                waiting, posted, pair = sends, recvs, (step.peer, rank)
            if not waiting[pair]:
                posted[pair].append(position)
                continue
            other = waiting[pair].popleft()
            if isinstance(step, Send):
                yield Message(rank, position, step.peer, other)
            else:
                yield Message(step.peer, other, rank, position)
            yield from completed(step.peer, other)
            yield from completed(rank, position)

    if not all(finished):
        raise ScheduleError(_stuck(schedule, current, outstanding, finished))


def _stuck(
    schedule: Schedule,
    current: list[tuple[int, Round]],
    outstanding: list[set[int]],
    finished: list[bool],
) -> str:
    lines = [f"{schedule}: ranks wait for ever"]
    for rank, done in enumerate(finished):
        if done:
            continue
        number, steps = current[rank]
        for position in sorted(outstanding[rank]):
            step = steps[position]
            assert isinstance(step, Send | Recv | RecvReduce)
            peer = "has finished" if finished[step.peer] else f"is in round {current[step.peer][0]}"
            what = "send to" if isinstance(step, Send) else "receive from"
            lines.append(
                f"  rank {rank} round {number}: {what} rank {step.peer} ({step}) is never matched; "
                f"rank {step.peer} {peer}"
            )
    return "\n".join(lines)
