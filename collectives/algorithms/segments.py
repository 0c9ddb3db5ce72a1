"""Segments: any schedule run on slices of its buffers, one after the other or overlapping.

One after the other, a slice stays in the cache from its first step to its last.  Overlapping, slice
s runs s rounds behind slice 0, so that a rank sends one while it receives or reduces another: the
pipelining of trees and chains, with no second version of the algorithm.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, zip_longest

from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Schedule, mapped

#: Most segments; more take longer to bind than they save.  For 1 GiB along 64 messages of 1.5 us at
#: 25 GB/s the best number is 1343, and this one costs 1 % more.
MOST_SEGMENTS = 1024


def segmented(schedule: Schedule, count: int, overlap: bool = False) -> Schedule:
    """``schedule`` on ``count`` segments; each block is cut into segments, each of these as before.

    Cost: ``count`` times the rounds one after the other; overlapping, ``count - 1`` more rounds.

    Raises:
        ValueError: for a count below 1.
    """
    if count < 1:
        raise ValueError(f"a schedule has at least one segment, not {count}")
    if count == 1:
        return schedule

    def generate(rank: int) -> Iterator[Round]:
        runs = [_moved(schedule, rank, segment, count) for segment in range(count)]
        if not overlap:
            yield from chain.from_iterable(runs)
            return
        late = (chain([()] * segment, run) for segment, run in enumerate(runs))
        for rounds in zip_longest(*late, fillvalue=()):
            yield tuple(chain.from_iterable(rounds))

    return _cut(schedule, count, generate, " overlapping" if overlap else "")


def first_segment(schedule: Schedule, count: int) -> Schedule:
    """The first of ``count`` segments that run one after the other, alone.  The next one does the
    same ``schedule.chunks`` chunks further on."""
    if count == 1:
        return schedule
    return _cut(schedule, count, lambda rank: _moved(schedule, rank, 0, count))


def _cut(
    schedule: Schedule, count: int, generate: Callable[[int], Iterator[Round]], how: str = ""
) -> Schedule:
    return replace(
        schedule,
        algorithm=f"{schedule.algorithm} in {count}{how} segments",
        chunks=schedule.chunks * count,
        workspace=-(-schedule.workspace // schedule.chunks) * schedule.chunks * count,
        generate=generate,
    )


def _moved(schedule: Schedule, rank: int, segment: int, count: int) -> Iterator[Round]:
    """The rounds of ``rank`` with every chunk replaced by those of one segment."""

    def same_peer(peer: int) -> int:
        return peer

    def at(chunk: Chunk) -> Iterator[Chunk]:
        """One chunk for each block that it reaches into: segments of two blocks do not touch."""
        n = schedule.chunks
        for block in range(chunk.start // n, (chunk.stop - 1) // n + 1):
            start, stop = max(chunk.start, block * n), min(chunk.stop, (block + 1) * n)
            offset = (block * (count - 1) + segment) * n
            yield Chunk(chunk.buffer, start + offset, stop + offset)

    for steps in schedule.rounds(rank):
        yield tuple(moved for step in steps for moved in mapped(step, at, same_peer))


def passes_on(schedule: Schedule) -> bool:
    """Whether a rank reduces or sends on received data, so that the cache helps.

    Cost: one step of Python for each chunk that a step names, on all ranks, up to the first such.
    """
    for rank in range(schedule.size):
        received: set[tuple[str, int]] = set()
        for steps in schedule.rounds(rank):
            for step in steps:
                read = step.source if isinstance(step, Copy) else step.chunk
                if isinstance(step, RecvReduce) or not received.isdisjoint(_places(read)):
                    return True
            received.update(*(_places(step.chunk) for step in steps if isinstance(step, Recv)))
    return False


def _places(chunk: Chunk) -> Iterator[tuple[str, int]]:
    return ((chunk.buffer, i) for i in range(chunk.start, chunk.stop))
