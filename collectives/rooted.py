"""Any rank as the root of a schedule that is written for root 0."""

from collections.abc import Iterator
from dataclasses import replace

from collectives.schedule import Copy, Round, Schedule, Step


def rooted(schedule: Schedule, root: int) -> Schedule:
    """``schedule`` with every rank ``root`` further, modulo the size.

    What a rank does stays the same but for its peers' numbers, and so does its correctness.
    """
    if root == 0:
        return schedule
    size = schedule.size

    def moved(step: Step) -> Step:
        return step if isinstance(step, Copy) else step._replace(peer=(step.peer + root) % size)

    def generate(rank: int) -> Iterator[Round]:
        for steps in schedule.rounds((rank - root) % size):
            yield tuple(map(moved, steps))

    return replace(schedule, generate=generate)
