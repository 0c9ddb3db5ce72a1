"""Schedules with one step changed, or two in the other order: the proof must notice."""

from dataclasses import replace

import numpy as np

from collectives.execution.local import run
from collectives.schedule import Chunk, Copy, Recv, RecvReduce, Send


def mutants(schedule):
    whole = [list(schedule.rounds(rank)) for rank in range(schedule.size)]
    for rank, program in enumerate(whole):
        for changed in changes(program, schedule.limits(rank), schedule.size):
            rounds = [*whole[:rank], changed, *whole[rank + 1 :]]
            yield replace(schedule, generate=lambda at, own=rounds: iter(own[at]))


def results(schedule):
    """Each rank's result of numbers of which no two sums are likely to be equal."""
    ranks, rng = range(schedule.size), np.random.default_rng(schedule.size)
    if schedule.contract.idempotent:
        return run(schedule, [np.array([1 << rank]) for rank in ranks], np.bitwise_or)
    counts = [schedule.limits(rank)["sendbuf"] * 3 for rank in ranks]
    return run(schedule, [rng.integers(1 << 62, size=count) for count in counts], np.add)


def changes(program, limits, size):
    for number, steps in enumerate(program):
        before, after = program[:number], program[number + 1 :]
        for at, step in enumerate(steps):
            head, tail = steps[:at], steps[at + 1 :]
            yield [*before, head + tail, *after]
            for other in alternatives(size, limits, step):
                yield [*before, (*head, other, *tail), *after]
            if after and after[0]:
                following, *rest = after[0]
                yield [*before, (*head, following, *tail), (step, *rest), *after[1:]]
        if after and steps != after[0]:
            yield [*before, after[0], steps, *after[1:]]


def alternatives(size, limits, step):
    """The step with another peer, chunk, operand or kind."""
    if not isinstance(step, Copy) and size > 2:
        yield step._replace(peer=(step.peer + 1) % size)
    for field in {"chunk", "source", "operand"} & {*step._fields}:
        if chunk := getattr(step, field):  # one further, from the end to the beginning
            start = chunk.start + 1 if chunk.stop < limits[chunk.buffer] else 0
            if start != chunk.start:
                yield step._replace(**{field: Chunk(chunk.buffer, start, start + chunk.length)})
    match step:
        case Recv(peer, chunk):
            yield RecvReduce(peer, chunk)
        case RecvReduce(peer, chunk, operand):
            yield Recv(peer, chunk)
            if operand and operand.buffer != chunk.buffer:
                yield RecvReduce(peer, chunk)
        case Send(peer, Chunk("recvbuf", start, stop)) if stop <= limits["sendbuf"]:
            yield Send(peer, Chunk("sendbuf", start, stop))
