"""A schedule in time, on stages whose passes take given times."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.pipeline.actions import Action, Pipeline, Update
from mpitrain.pipeline.replay import StageReplica, needs, replay
from mpitrain.pipeline.schedules import Generator


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a micro-batch in a whole stage; chunks take an equal part each.

    Attributes:
        forward: F.
        backward_input, backward_weight: B and W, whose sum a Backward takes.
        message: a message from one stage to the next.
        update: the reduction of the gradients and the optimiser step.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    message: float = 0.0
    update: float = 0.0

    def of(self, action: Action, chunks: int) -> float:
        if isinstance(action, Update):
            return self.update
        f, i, w = self.forward, self.backward_input, self.backward_weight
        return {"F": f, "B": i + w, "I": i, "W": w}[action.letter] / chunks


@dataclass(frozen=True)
class TimedAction:
    """An action in time, in seconds."""

    place: StageReplica
    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Simulation:
    """A schedule in time: its blocks, in order of dependency, and the seconds of the whole run.

    ``bubble``: part of the time in which ranks are idle, mean over the ranks.
    """

    blocks: Sequence[TimedAction]
    seconds: float
    bubble: float


def simulate(
    generate: Generator, pipeline: Pipeline, times: PassTimes | Sequence[PassTimes] = PassTimes()
) -> Simulation:
    """Start each action as early as its rank and its sources allow.

    ``times`` are of all stages, or of each stage.

    Raises:
        PipelineError: the schedule cannot run.
    """
    by_stage = [times] * pipeline.stages if isinstance(times, PassTimes) else times
    free: dict[StageReplica, float] = dict.fromkeys(pipeline.places(), 0.0)
    ended: dict[tuple[StageReplica, Action], float] = {}
    blocks = []
    for place, action in replay(generate, pipeline).order:
        sources = [s for s in needs(pipeline, place, action) if s in ended]
        ready = max((ended[s] + _message(s[0], place, by_stage) for s in sources), default=0.0)
        start = max(free[place], ready)
        stop = start + by_stage[place[0]].of(action, pipeline.chunks)
        free[place] = ended[place, action] = stop
        blocks.append(TimedAction(place, action, start, stop))
    seconds = max(free.values())
    busy = sum(block.stop - block.start for block in blocks)
    bubble = 1 - busy / (len(free) * seconds) if seconds else 0.0
    return Simulation(blocks, seconds, bubble)


def _message(source: StageReplica, target: StageReplica, times: Sequence[PassTimes]) -> float:
    return 0.0 if source == target else times[source[0]].message
