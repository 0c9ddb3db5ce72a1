"""A schedule in time, on stages whose passes take given times."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.pipeline.actions import Action, Forward, Pipeline, Update
from mpitrain.pipeline.replay import Report, StageReplica, replay
from mpitrain.pipeline.schedules import Generator


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a micro-batch in a stage.

    Attributes:
        forward: F.
        backward_input, backward_weight: B and W, whose sum a Backward takes.
        message: the stage's output to the next stage, or its gradient from there.
        update: the reduction of the gradients and the optimiser step.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    message: float = 0.0
    update: float = 0.0

    def of(self, action: Action) -> float:
        if isinstance(action, Update):
            return self.update
        f, i, w = self.forward, self.backward_input, self.backward_weight
        return {"F": f, "B": i + w, "I": i, "W": w}[action.letter]

    def chunk(self, chunks: int) -> "PassTimes":
        """Times of one of several equal chunks of the stage."""
        b, w = self.backward_input / chunks, self.backward_weight / chunks
        return PassTimes(self.forward / chunks, b, w, self.message, self.update)


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


def balanced(pipeline: Pipeline, times: PassTimes) -> list[PassTimes]:
    """Times of each virtual stage if all replicas of all stages have equally much to do.

    ``times``: passes of a stage of one replica; a stage of r replicas takes r times as long.
    """
    found = []
    for virtual in range(pipeline.virtual_stages):
        own = pipeline.replicas[pipeline.placement(pipeline.stages, virtual)]
        f, b, w = times.forward * own, times.backward_input * own, times.backward_weight * own
        found.append(PassTimes(f, b, w, times.message, times.update).chunk(pipeline.chunks))
    return found


def simulate(
    generate: Generator, pipeline: Pipeline, times: PassTimes | Sequence[PassTimes] = PassTimes()
) -> Simulation:
    """Start each action as early as its rank and its sources allow.

    ``times`` are of every stage, whose chunks take an equal part each, or one of each virtual
    stage, the first of which has its stage's update.

    Raises:
        PipelineError: the schedule cannot run.
    """
    return in_time(replay(generate, pipeline), times)


def in_time(report: Report, times: PassTimes | Sequence[PassTimes]) -> Simulation:
    """Like :func:`simulate`, for a schedule that was replayed."""
    pipeline = report.pipeline
    if isinstance(times, PassTimes):
        times = [times.chunk(pipeline.chunks)] * pipeline.virtual_stages
    free: dict[StageReplica, float] = dict.fromkeys(pipeline.places(), 0.0)
    blocks: list[TimedAction] = []
    for (place, action), sources in zip(report.order, report.sources, strict=True):
        virtual = pipeline.dealt[place[0]][0 if isinstance(action, Update) else action.chunk]
        # A forward pass waits for the output of the stage before, any other for its own gradient.
        message = times[virtual - isinstance(action, Forward)].message
        ready = max(
            (
                source.stop + (message if source.place[0] != place[0] else 0.0)
                for source in map(blocks.__getitem__, sources)
            ),
            default=0.0,
        )
        start = max(free[place], ready)
        stop = start + times[virtual].of(action)
        free[place] = stop
        blocks.append(TimedAction(place, action, start, stop))
    seconds = max(free.values())
    busy = sum(block.stop - block.start for block in blocks)
    bubble = 1 - busy / (len(free) * seconds) if seconds else 0.0
    return Simulation(blocks, seconds, bubble)
