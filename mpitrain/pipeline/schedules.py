"""Pipeline schedules: pure generators of the actions of a replica of a stage.

Each yields, for one run of the pipeline, every Forward and Backward of its micro-batches and at
last an Update (those that update as they go: after each Backward).  p stages, m micro-batches a
replica, v chunks a stage; F, B and W are the times of a forward pass and the two halves of a
backward pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mpitrain.pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Pipeline,
    Update,
)

Generator = Callable[[Pipeline, int, int], Iterator[Action]]


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule and its published properties.

    Attributes:
        name: name in job files and on the command line.
        generate: the actions of a replica of a stage.
        synchronous: whether the only update is at the end of a run.
        bubble: idle share for p stages, m micro-batches a replica, v chunks and times F, B and W.
        held: most activations that stage s holds.
    """

    name: str
    generate: Generator
    held: Callable[[int, int, int, int], int]
    bubble: Callable[[int, int, int, float, float, float], float]
    synchronous: bool

    @property
    def description(self) -> str:
        """One line: the first of the generator's docstring."""
        first = (self.generate.__doc__ or "").partition(".\n")[0]
        return first[:1].lower() + first[1:]


#: The schedules by name.
SCHEDULES: dict[str, PipelineSchedule] = {}


def _flush_bubble(p: int, m: int, v: int, f: float, b: float, w: float) -> float:
    return (p - 1) / (v * m + p - 1)


def _zero_bubble_share(p: int, m: int, v: int, f: float, b: float, w: float) -> float:
    idle = (p - 1) * (f + b - w)
    return idle / (idle + m * (f + b + w))


def _published(
    name: str,
    held: Callable[[int, int, int, int], int],
    bubble: Callable[[int, int, int, float, float, float], float] = _flush_bubble,
    *,
    synchronous: bool = True,
) -> Callable[[Generator], Generator]:
    """Enter a generator into the table."""

    def enter(generate: Generator) -> Generator:
        SCHEDULES[name] = PipelineSchedule(name, generate, held, bubble, synchronous)
        return generate

    return enter


@_published("gpipe", lambda p, m, v, s: m)
def gpipe(pipeline: Pipeline, stage: int, replica: int) -> Iterator[Action]:
    """All forward, then all backward (Huang et al. 2019).

    Bubble (p-1)/(m+p-1); the activations of all m micro-batches are held.
    """
    own = pipeline.own(stage, replica)
    yield from map(Forward, own)
    yield from map(Backward, own)
    yield Update(0)


@_published("1f1b", lambda p, m, v, s: min(m, p - s))
def one_f_one_b(pipeline: Pipeline, stage: int, replica: int) -> Iterator[Action]:
    """Forward and backward in turn, then an update (PipeDream-flush).

    Bubble (p-1)/(m+p-1); stage s holds the activations of at most p-s micro-batches (Narayanan et
    al. 2021).
    """
    yield from _alternate(pipeline, stage, replica)
    yield Update(0)


@_published("interleaved", lambda p, m, v, s: min(m * v, 2 * (p - 1 - s) + (v - 1) * p + 1))
def interleaved(pipeline: Pipeline, stage: int, replica: int) -> Iterator[Action]:
    """1F1B over several chunks of the model a stage (Narayanan et al. 2021).

    Stages pass a micro-batch on v times.  Bubble (p-1)/(vm+p-1), for v times the messages.  m must
    be a multiple of p.
    """
    p, v = pipeline.stages, pipeline.chunks
    own = pipeline.own(stage, replica)
    if len(own) % p:
        raise ValueError(
            f"interleaved needs micro-batches in multiples of the {p} stages, not {len(own)}"
        )
    # Micro-batches in groups of p: a group passes the first chunk, then the second, ...
    order = [
        (own[first + i], chunk)
        for first in range(0, len(own), p)
        for chunk in range(v)
        for i in range(p)
    ]
    forward = [Forward(m, chunk) for m, chunk in order]
    backward = [Backward(m, v - 1 - chunk) for m, chunk in order]
    ahead = min(len(order), 2 * (p - 1 - stage) + (v - 1) * p)
    yield from forward[:ahead]
    for f, b in zip(forward[ahead:], backward):
        yield f
        yield b
    yield from backward[len(forward) - ahead :]
    yield Update(0)


@_published("zero_bubble", lambda p, m, v, s: min(m, p), _zero_bubble_share)
def zero_bubble(pipeline: Pipeline, stage: int, replica: int) -> Iterator[Action]:
    """1F1B with weight gradients in the bubbles (ZB-H1, Qi et al. 2024).

    Bubble (p-1)(F+B-W) of (p-1)(F+B-W) + m(F+B+W), a third of 1F1B's if F = B = W; activations, or
    their parts for weight gradients, are held for at most p micro-batches.
    """
    own = pipeline.own(stage, replica)
    ahead = min(len(own), _stages_after(pipeline, stage))
    held = 0  # micro-batches whose weight gradients wait; stage s lets s of them
    yield from map(Forward, own[:ahead])
    for index, micro_batch in enumerate(own):
        if index + ahead < len(own):
            yield Forward(own[index + ahead])
        yield BackwardInput(micro_batch)
        held += 1
        if held > stage or index + ahead >= len(own):
            yield BackwardWeight(own[index + 1 - held])
            held -= 1
    for waiting in own[len(own) - held :]:
        yield BackwardWeight(waiting)
    yield Update(0)


@_published("asynchronous", lambda p, m, v, s: min(m, p - s), synchronous=False)
def asynchronous(pipeline: Pipeline, stage: int, replica: int) -> Iterator[Action]:
    """1F1B that never drains, on weights of several ages (PipeDream 2019).

    An update follows each ``accumulate`` Backwards.  No bubble but the first and last; weights are
    up to p-1 updates old where they are used.
    """
    updates = done = 0
    every = pipeline.accumulate
    for action in _alternate(pipeline, stage, replica):
        yield action
        if isinstance(action, Backward):
            done += 1
            if done % every == 0:
                yield Update(updates)
                updates += 1


def _alternate(pipeline: Pipeline, stage: int, replica: int) -> Iterator[Action]:
    own = pipeline.own(stage, replica)
    ahead = min(len(own), _stages_after(pipeline, stage))
    yield from map(Forward, own[:ahead])
    for index, micro_batch in enumerate(own):
        if index + ahead < len(own):
            yield Forward(own[index + ahead])
        yield Backward(micro_batch)


def _stages_after(pipeline: Pipeline, stage: int) -> int:
    """Micro-batches that a replica must send ahead so that those of later stages have work."""
    return -(-sum(pipeline.replicas[stage + 1 :]) // pipeline.replicas[stage])
