"""Breaks schedules step by step, to find out what the verifier would miss.

A *mutant* differs from its schedule in one step or in the order of two.  Each must be rejected by
the verifier or, run on real data with all ranks in one process, give the right result all the same
(two rounds that do not depend on each other may change places).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from collectives.contracts import Contract, contract
from collectives.errors import ScheduleError
from collectives.executor import Items
from collectives.local import run
from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Schedule, Send, Step
from collectives.verify import prove

Programme = list[Round]
_ITEMS_PER_CHUNK = 3


class Mutant(NamedTuple):
    """A broken schedule, and what was done to it."""

    description: str
    schedule: Schedule


class Survey(NamedTuple):
    """How the mutants of one schedule fared; ``missed`` gave a wrong result unnoticed."""

    mutants: int
    rejected: int
    harmless: int
    missed: int


def survey(schedule: Schedule) -> Survey:
    """Verifies every mutant, and runs those that the verifier accepts."""
    rejected = harmless = missed = 0
    inputs = _inputs(schedule)
    right = run(schedule, inputs)
    for mutant in mutants(schedule):
        if is_rejected(mutant.schedule):
            rejected += 1
        elif is_harmless(mutant.schedule, inputs, right):
            harmless += 1
        else:
            missed += 1
    return Survey(rejected + harmless + missed, rejected, harmless, missed)


def is_rejected(schedule: Schedule) -> bool:
    """Whether the verifier finds the schedule wrong."""
    try:
        prove(schedule)
    except ScheduleError:
        return True
    return False


def is_harmless(schedule: Schedule, inputs: list[Items], right: list[Items]) -> bool:
    """Whether a run of real data ends, and ends with ``right`` on every rank."""
    try:
        results = run(schedule, inputs)
    except (ScheduleError, ValueError):
        return False
    return all(map(np.array_equal, results, right))


def _inputs(schedule: Schedule) -> list[Items]:
    """Random 62-bit integers: no two sums of different contributions are likely to be equal."""
    blocks = contract(schedule.collective).send_blocks(schedule.size)
    rng = np.random.default_rng(schedule.size)
    count = blocks * schedule.chunks * _ITEMS_PER_CHUNK
    return [rng.integers(1 << 62, size=count) for _ in range(schedule.size)]


def mutants(schedule: Schedule) -> Iterator[Mutant]:
    """All mutants of a schedule, one after the other."""
    for rank in range(schedule.size):
        programme = list(schedule.rounds(rank))
        for description, changed in _changed(schedule, programme):
            generate = _with(schedule, rank, changed)
            yield Mutant(f"rank {rank} {description}", replace(schedule, generate=generate))


def _with(schedule: Schedule, rank: int, programme: Programme):  # type: ignore[no-untyped-def]
    return lambda r: iter(programme) if r == rank else schedule.generate(r)


def _changed(schedule: Schedule, programme: Programme) -> Iterator[tuple[str, Programme]]:
    """One rank's programme with one change each."""
    for number, steps in enumerate(programme):
        before, after = programme[:number], programme[number + 1 :]
        for position, step in enumerate(steps):
            head, tail = steps[:position], steps[position + 1 :]
            where = f"round {number}: {step}"
            yield f"{where} dropped", [*before, head + tail, *after]
            for other in _alternatives(schedule, step):
                yield f"{where} became {other}", [*before, (*head, other, *tail), *after]
            if after and after[0]:
                following, *rest = after[0]
                exchanged = [(*head, following, *tail), (step, *rest)]
                yield f"{where} exchanged with {following}", [*before, *exchanged, *after[1:]]
        if after and steps != after[0]:
            yield f"round {number} after the next", [*before, after[0], steps, *after[1:]]


def _alternatives(schedule: Schedule, step: Step) -> Iterator[Step]:
    """The step with another peer, chunk, operand or kind."""
    if not isinstance(step, Copy) and schedule.size > 2:
        yield step._replace(peer=(step.peer + 1) % schedule.size)
    yield from (step._replace(chunk=chunk) for chunk in _shifted(schedule, step.chunk))
    match step:
        case Recv(peer, chunk):
            yield RecvReduce(peer, chunk)
        case RecvReduce(peer, chunk, operand):
            yield Recv(peer, chunk)
            if operand:
                yield from (step._replace(operand=o) for o in _shifted(schedule, operand))
                if operand.buffer != chunk.buffer:
                    yield RecvReduce(peer, chunk)
        case Copy(_, source):
            yield from (step._replace(source=s) for s in _shifted(schedule, source))
        case Send(peer, Chunk("recvbuf", start, stop)) if _has(schedule, "sendbuf", stop):
            yield Send(peer, Chunk("sendbuf", start, stop))


def _shifted(schedule: Schedule, chunk: Chunk) -> Iterator[Chunk]:
    """The chunk one further, from the end to the beginning, if it has where to go."""
    length = chunk.stop - chunk.start
    start = chunk.start + 1 if _has(schedule, chunk.buffer, chunk.stop + 1) else 0
    if start != chunk.start:
        yield chunk._replace(start=start, stop=start + length)


def _has(schedule: Schedule, buffer: str, chunks: int) -> bool:
    blocks: Contract = contract(schedule.collective)
    limits = {
        "sendbuf": blocks.send_blocks(schedule.size) * schedule.chunks,
        "recvbuf": blocks.recv_blocks(schedule.size) * schedule.chunks,
        "workspace": schedule.workspace,
    }
    return chunks <= limits[buffer]
