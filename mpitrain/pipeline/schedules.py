"""Pipeline schedules: pure generators of the actions of a replica of a stage.

Each yields, for one run of the pipeline, every Forward and Backward of its micro-batches and at
last an Update (those that update as they go: after each Backward).  p stages, m micro-batches a
replica, v chunks a stage; F, B and W are the times of a forward pass and the two halves of a
backward pass.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps

from mpitrain.pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Pipeline,
    Placement,
    Update,
    loop,
    vee,
)

Generator = Callable[[Pipeline, int, int], Iterator[Action]]
#: The passes of a stage, of which a replica has m micro-batches, as :func:`_passes` reads them.
Rule = Callable[[Pipeline, int, int], str]
#: Idle share for p stages, m micro-batches a replica, v chunks and times F, B and W.
Bubble = Callable[[int, int, int, float, float, float], float]
#: Most activations that stage s holds, for p, m, v and s.
Held = Callable[[int, int, int, int], int]


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule and the pipelines that it is for.

    Attributes:
        generate: the actions of a replica of a stage.
        chunks: pieces of the model on each stage; None: as many as the job says.
        placement: stage of each piece.
        synchronous: whether the only update is at the end of a run.
        held: most activations of chunks that a stage holds.
        bubble: idle share of the ranks; in a V, where F = B = W.  Its docstring is the formula, for
            v chunks.
        fills: ``bubble`` holds from ``m = fills * p`` on.
    """

    name: str
    generate: Generator
    chunks: int | None
    placement: Placement
    synchronous: bool
    held: Held
    bubble: Bubble
    fills: int

    @property
    def description(self) -> str:
        """One line: the first of the generator's docstring."""
        first = (self.generate.__doc__ or "").partition(".\n")[0]
        return first if first[1:2].isupper() else first[:1].lower() + first[1:]

    def pipeline(
        self, replicas: tuple[int, ...], micro_batches: int, chunks: int, accumulate: int = 1
    ) -> Pipeline:
        """A pipeline of such stages; ``chunks``: the job's, for schedules that take any number."""
        return Pipeline(replicas, micro_batches, self.chunks or chunks, accumulate, self.placement)


#: The schedules by name.
SCHEDULES: dict[str, PipelineSchedule] = {}


def _idle_share(idle: float, m: int, passes: float) -> float:
    return idle / (idle + m * passes)


def _flush_bubble(p: int, m: int, v: int, f: float, b: float, w: float) -> float:
    """(p-1)/(vm+p-1)"""
    return (p - 1) / (v * m + p - 1)


def _zero_bubble_share(p: int, m: int, v: int, f: float, b: float, w: float) -> float:
    """i/(i+m(F+I+W)), i = (p-1) max(F, I, F+I-W)"""
    return _idle_share((p - 1) * max(f, b, f + b - w), m, f + b + w)


def _published(
    name: str,
    held: Held,
    bubble: Bubble = _flush_bubble,
    *,
    chunks: int | None = 1,
    placement: Placement = loop,
    synchronous: bool = True,
    fills: int = 0,
) -> Callable[[Rule], Rule]:
    """Enter the generator of a rule, and of the updates between or after it, into the table."""

    def enter(rule: Rule) -> Rule:
        @wraps(rule)
        def generate(pipeline: Pipeline, stage: int, replica: int) -> Iterator[Action]:
            own, done = pipeline.own(stage, replica), 0
            for action in _passes(own, rule(pipeline, stage, len(own))):
                yield action
                if isinstance(action, Backward) and not synchronous:
                    done += 1
                    if done % pipeline.accumulate == 0:
                        yield Update(done // pipeline.accumulate - 1)
            if synchronous:
                yield Update(0)

        SCHEDULES[name] = PipelineSchedule(
            name, generate, chunks, placement, synchronous, held, bubble, fills
        )
        return rule

    return enter


def _passes(own: range, rule: str) -> Iterator[Action]:
    """The passes of a rule such as ``"F0 F1 B1 "``: letter and chunk of each.

    Each takes the next of the own micro-batches through its chunk, and is left out when there is
    none left; ``W`` takes the one whose weight gradients have waited longest.
    """
    forward: Counter[int] = Counter()
    backward: Counter[int] = Counter()
    waiting: deque[tuple[int, int]] = deque()
    for step in rule.split():
        letter, chunk = step[0], int(step[1:] or 0)
        if letter == "W":
            if waiting:
                yield BackwardWeight(*waiting.popleft())
            continue
        done = forward if letter == "F" else backward
        if done[chunk] == len(own):
            continue
        micro_batch = own[done[chunk]]
        done[chunk] += 1
        if letter == "F":
            yield Forward(micro_batch, chunk)
        elif letter == "B":
            yield Backward(micro_batch, chunk)
        else:
            yield BackwardInput(micro_batch, chunk)
            waiting.append((micro_batch, chunk))


@_published("gpipe", lambda p, m, v, s: m)
def gpipe(pipeline: Pipeline, stage: int, m: int) -> str:
    """All forward, then all backward (Huang et al. 2019).

    Bubble (p-1)/(m+p-1); the activations of all m micro-batches are held.
    """
    return m * "F " + m * "B "


@_published("1f1b", lambda p, m, v, s: min(m, p - s))
def one_f_one_b(pipeline: Pipeline, stage: int, m: int) -> str:
    """Forward and backward in turn, then an update (PipeDream-flush).

    Bubble (p-1)/(m+p-1); stage s holds the activations of at most p-s micro-batches (Narayanan et
    al. 2021).
    """
    return _stages_after(pipeline, stage) * "F " + m * "F B "


@_published(
    "interleaved", lambda p, m, v, s: min(m * v, 2 * (p - 1 - s) + (v - 1) * p + 1), chunks=None
)
def interleaved(pipeline: Pipeline, stage: int, m: int) -> str:
    """1F1B over several chunks of the model a stage (Narayanan et al. 2021).

    Stages pass a micro-batch on v times.  Bubble (p-1)/(vm+p-1), for v times the messages.  m must
    be a multiple of p.
    """
    p, v = pipeline.stages, pipeline.chunks
    if m % p:
        raise ValueError(
            f"interleaved needs micro-batches in multiples of the {p} stages, not {m}; set "
            "train.micro_batches"
        )
    # Micro-batches in groups of p: a group passes the first chunk, then the second, ...
    chunks = [chunk for _ in range(0, m, p) for chunk in range(v) for _ in range(p)]
    ahead = min(m * v, 2 * (p - 1 - stage) + (v - 1) * p)
    first = [f"F{chunk}" for chunk in chunks[:ahead]]
    in_turn = [f"F{one} B{v - 1 - other}" for one, other in zip(chunks[ahead:], chunks)]
    return " ".join([*first, *in_turn, *(f"B{v - 1 - chunk}" for chunk in chunks[len(in_turn) :])])


@_published("zero_bubble", lambda p, m, v, s: min(m, p), _zero_bubble_share, fills=1)
def zero_bubble(pipeline: Pipeline, stage: int, m: int) -> str:
    """1F1B with weight gradients in the bubbles (ZB-H1, Qi et al. 2024).

    From m = p on, ranks idle for (p-1) max(F, B, F+B-W), a third of 1F1B's time if F = B = W;
    activations, or their parts for weight gradients, are held for at most p micro-batches.
    """
    ahead = min(m, _stages_after(pipeline, stage))
    # The weight gradients of one micro-batch for each stage before this one may wait.
    behind = min(stage, m - ahead)
    return ahead * "F " + behind * "F I " + m * "F I W " + behind * "W "


@_published("asynchronous", lambda p, m, v, s: min(m, p - s), synchronous=False)
def asynchronous(pipeline: Pipeline, stage: int, m: int) -> str:
    """1F1B that never drains, on weights of several ages (PipeDream 2019).

    An update follows each ``accumulate`` Backwards, so that a stage of fewer replicas updates more
    often.  No bubble but the first and last; weights are up to p-1 updates old where they are used.
    """
    return sent_ahead(pipeline, stage) * "F " + m * "F B "


def sent_ahead(pipeline: Pipeline, stage: int) -> int:
    """Micro-batches that a replica of an asynchronous stage sends ahead.

    All replicas of the next stage then have one each to work on, and those that they send ahead in
    turn.  It is one more between stages of unequal width, where gradients come one after the other
    to replicas that wait for each other in their sums.
    """
    found, after = 0, 0
    for own in reversed(pipeline.replicas[stage:]):
        if after:
            found = -(-after * (found + 1) // own) + (own != after)
        after = own
    return found


def _stages_after(pipeline: Pipeline, stage: int) -> int:
    """Micro-batches that a replica must send ahead so that those of later stages have work."""
    return -(-sum(pipeline.replicas[stage + 1 :]) // pipeline.replicas[stage])


def _in_v(name: str, held: Held, idle: Callable[[int], float]) -> Callable[[Rule], Rule]:
    """Enter a schedule of two chunks a stage in a V.

    ``idle``: idle time of a rank where F = B = W = 1, by p.
    """

    def bubble(p: int, m: int, v: int, f: float, b: float, w: float) -> float:
        """i/(i+3m), i the idle time of docs/parallelism.md"""
        return _idle_share(idle(p) * (f + b + w) / 3, m, f + b + w)

    return _published(name, held, bubble, chunks=2, placement=vee, fills=2)


def _even(pipeline: Pipeline) -> int:
    """The number of stages; ``ValueError``: one has more replicas than another."""
    if len(set(pipeline.replicas)) > 1:
        raise ValueError(
            "a V needs equally many replicas of each stage; take 1f1b or zero_bubble for "
            f"{'-'.join(map(str, pipeline.replicas))}"
        )
    return pipeline.stages


@_in_v("zb_v", lambda p, m, v, s: min(2 * m, 2 * p), lambda p: (p - 1) / 2)
def zb_v(pipeline: Pipeline, stage: int, m: int) -> str:
    """ZB-H1 over a V, on whose tip and ends neighbours are one rank (ZB-V, Qi et al. 2024).

    Idle (p-1)/2 where F = B = W = 1; each stage holds 2p activations of half a stage.
    """
    p, r = _even(pipeline), stage
    m = max(m, 2 * p - 1)
    return (
        (2 * (p - r) - 1) * "F0 "
        + r * "F1 F0 "
        + (p - r) * "F1 I1 W "
        + (m - p) * "F0 I0 W F1 I1 W "
        + r * "I0 I1 "
        + (p - r) * "I0 W "
        + m * "W "
    )


@_in_v("dualpipe_v", lambda p, m, v, s: min(2 * m, 2 * p + 1), lambda p: (p - 1) / 2)
def dualpipe_v(pipeline: Pipeline, stage: int, m: int) -> str:
    """Forward of one chunk and backward of the other in turn, over a V (DualPipeV, DeepSeek 2025).

    Idle (p-1)/2 where F = B = W = 1; each stage holds 2p+1 activations of half a stage.
    """
    p, r = _even(pipeline), stage
    m = max(m, 2 * p)
    both = (r + 1) * "B1 B0 "  # the weight gradients of their later half wait
    half = len(both) // 2
    return (
        2 * (p - r - 1) * "F0 "
        + (r + 1) * "F0 F1 "
        + (p - r - 1) * "I1 W F1 "
        + (m - 2 * p + r + 1) * "F0 B1 F1 B0 "
        + (p - r - 1) * "B1 F1 B0 "
        + both[:half]
        + both[half:].replace("B", "I")
        + (p - r - 1) * "W I0 "
        + (r + 1) * "W "
    )


@_in_v(
    "v_half",
    lambda p, m, v, s: min(2 * m, 2 * (p // 2 + 1)),
    lambda p: 7 * (p - 1) / 4 if p % 2 else (7 * p - 4) / 4,
)
def v_half(pipeline: Pipeline, stage: int, m: int) -> str:
    """Half of 1F1B's activations, over a V (V-Half, Qi et al. 2024).

    Idle 7(p-1)/4 where F = B = W = 1, and 3/4 more for even p; a stage holds p+1 activations of
    half a stage, or p+2.
    """
    p, r = _even(pipeline), stage
    d = 0 if p % 2 else 3
    block = (2 * r, 3 * p - r - 2, 3 * p + d + 2 * r - 1, 6 * p + d - r - 2)
    return _repeated(block, m)


@_in_v(
    "v_min",
    lambda p, m, v, s: min(2 * m, 2 * ((p + 1) // 3 + 1)),
    lambda p: max(0.0, 2 * p - (2.5 if p % 3 else 1.5)),
)
def v_min(pipeline: Pipeline, stage: int, m: int) -> str:
    """A third of 1F1B's activations, over a V (V-Min, Qi et al. 2024).

    Idle 2p - 5/2 where F = B = W = 1, and 1 more where 3 divides p; a stage holds 2(p+3)/3
    activations of half a stage, rounded.
    """
    p, r = _even(pipeline), stage
    d = 0 if p % 3 else 2
    block = (r, 2 * p - r - 1, 2 * p + d + r, 4 * p + d - r - 1)
    return _repeated(block, m)


def _repeated(block: tuple[int, ...], m: int) -> str:
    """The rule that begins the passes of a micro-batch at the slots of a block, another every six.

    Weight gradients fill the slots between.
    """
    slots = {
        6 * i + slot: step
        for i in range(m)
        for step, slot in zip(("F0", "F1", "I1", "I0"), block, strict=True)
    }
    return " ".join(slots.get(t, "W") for t in range(max(slots, default=0) + 1)) + 2 * m * " W"
