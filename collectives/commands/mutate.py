"""Mutation of schedules, step by step, to count the faults that the verifier would miss.

A *mutant* differs from its schedule in one step or in the order of two.  Each must be rejected by
the verifier or, run on real data with all ranks in one process, give the right result all the same
(two rounds that do not depend on each other may change places).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from collectives.analysis.verify import prove
from collectives.errors import ScheduleError
from collectives.execution.local import run
from collectives.execution.memory import Combine, Items
from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Round, Schedule, Send, Step

Program = list[Round]
_ITEMS_PER_CHUNK = 3


class Mutant(NamedTuple):
    """A broken schedule and a description of its fault."""

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
    right = run(schedule, inputs, _combine(schedule))
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


def is_harmless(schedule: Schedule, inputs: list[Items], right: list[Items | None]) -> bool:
    """Whether a run of real data ends, and ends with ``right`` on every rank."""
    try:
        results = run(schedule, inputs, _combine(schedule))
    except (ScheduleError, ValueError):
        return False
    return all(map(_same, results, right))


def _combine(schedule: Schedule) -> Combine:
    return np.bitwise_or if schedule.contract.idempotent else np.add


def _same(result: Items | None, right: Items | None) -> bool:
    """Whether a rank has the right result, which may be none."""
    return result is right is None or (
        result is not None and right is not None and np.array_equal(result, right)
    )


def _inputs(schedule: Schedule) -> list[Items]:
    """Random 62-bit integers: no two sums of different contributions are likely to be equal.

    Where contributions may come in twice, a bit for each rank.
    """
    if schedule.contract.idempotent:
        return [np.array([1 << rank]) for rank in range(schedule.size)]
    rng = np.random.default_rng(schedule.size)
    counts = [schedule.limits(r)["sendbuf"] * _ITEMS_PER_CHUNK for r in range(schedule.size)]
    return [rng.integers(1 << 62, size=count) for count in counts]


def mutants(schedule: Schedule) -> Iterator[Mutant]:
    """All mutants of a schedule, one after the other."""
    for rank in range(schedule.size):
        program = list(schedule.rounds(rank))
        for description, changed in _changed(schedule, rank, program):
            generate = _with(schedule, rank, changed)
            yield Mutant(f"rank {rank} {description}", replace(schedule, generate=generate))


def _with(schedule: Schedule, rank: int, program: Program):  # type: ignore[no-untyped-def]
    return lambda r: iter(program) if r == rank else schedule.generate(r)


def _changed(schedule: Schedule, rank: int, program: Program) -> Iterator[tuple[str, Program]]:
    """One rank's program with one change each."""
    limits = schedule.limits(rank)
    for number, steps in enumerate(program):
        before, after = program[:number], program[number + 1 :]
        for position, step in enumerate(steps):
            head, tail = steps[:position], steps[position + 1 :]
            where = f"round {number}: {step}"
            yield f"{where} dropped", [*before, head + tail, *after]
            for other in _alternatives(schedule.size, limits, step):
                yield f"{where} became {other}", [*before, (*head, other, *tail), *after]
            if after and after[0]:
                following, *rest = after[0]
                exchanged = [(*head, following, *tail), (step, *rest)]
                yield f"{where} exchanged with {following}", [*before, *exchanged, *after[1:]]
        if after and steps != after[0]:
            yield f"round {number} after the next", [*before, after[0], steps, *after[1:]]


def _alternatives(size: int, limits: dict[str, int], step: Step) -> Iterator[Step]:
    """The step with another peer, chunk, operand or kind."""
    if not isinstance(step, Copy) and size > 2:
        yield step._replace(peer=(step.peer + 1) % size)
    yield from (step._replace(chunk=chunk) for chunk in _shifted(limits, step.chunk))
    match step:
        case Recv(peer, chunk):
            yield RecvReduce(peer, chunk)
        case RecvReduce(peer, chunk, operand):
            yield Recv(peer, chunk)
            if operand:
                yield from (step._replace(operand=o) for o in _shifted(limits, operand))
                if operand.buffer != chunk.buffer:
                    yield RecvReduce(peer, chunk)
        case Copy(_, source):
            yield from (step._replace(source=s) for s in _shifted(limits, source))
        case Send(peer, Chunk("recvbuf", start, stop)) if stop <= limits["sendbuf"]:
            yield Send(peer, Chunk("sendbuf", start, stop))


def _shifted(limits: dict[str, int], chunk: Chunk) -> Iterator[Chunk]:
    """The chunk one further, from the end to the beginning, if it has where to go."""
    start = chunk.start + 1 if chunk.stop < limits[chunk.buffer] else 0
    if start != chunk.start:
        yield chunk._replace(start=start, stop=start + chunk.length)
