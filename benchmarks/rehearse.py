"""Idle share of the ranks in pipeline schedules whose stages sleep instead of computing.

    mpirun -n 4 python -m benchmarks.rehearse -m 8

It stands beside the simulated share and the published formula.
"""

import argparse
import sys
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator, abort_on_exception
from collectives.commands.arguments import above_zero, positive
from mpitrain.arrays import Array, Gradients, Parameters
from mpitrain.nn.context import RESTING, Context
from mpitrain.parallel.grid import Layout
from mpitrain.pipeline.mailbox import Spec
from mpitrain.pipeline.replay import replay
from mpitrain.pipeline.runtime import Runner
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.pipeline.simulate import PassTimes, simulate
from mpitrain.pipeline.stage import Emit, Latest, Stage


class SleepingStage(Stage):
    """Chunks that sleep for given times and count their activations.

    Attributes:
        busy: seconds of sleep.
        held, most_held: activations that are held now, and at most.
    """

    def __init__(self, times: PassTimes, chunks: int) -> None:
        self._times = times.chunk(chunks)
        self.busy = 0.0
        self.held = self.most_held = 0

    def forward(self, weights: Any, x: Array, context: Context = RESTING) -> tuple[Array, Any]:
        self._sleep(self._times.forward)
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        return x, None

    def backward(self, weights: Any, saved: Any, dy: Array, emit: Emit | None) -> tuple[Array, Any]:
        self._sleep(self._times.backward_input)
        if emit is not None:
            self.gradients(weights, None, emit)
        return dy, None

    def gradients(self, weights: Any, kept: Any, emit: Emit) -> None:
        self._sleep(self._times.backward_weight)
        self.held -= 1

    def _sleep(self, seconds: float) -> None:
        start = perf_counter()
        sleep(seconds)
        self.busy += perf_counter() - start


class _NoData:
    def samples(self, micro_batch: int) -> int:
        return 1

    def inputs(self, micro_batch: int) -> Array:
        return np.zeros((1, 1))

    def loss(self, micro_batch: int, outputs: Array) -> tuple[float, Array]:
        return 0.0, outputs


class _NoWeights:
    def take(self, layer: int) -> Parameters:
        return {}

    def release(self, layer: int) -> None:
        pass

    def accumulate(self, layer: int, gradients: Gradients) -> None:
        pass

    def ready(self, layer: int) -> None:
        pass

    def progress(self) -> None:
        pass


@dataclass(frozen=True)
class Rehearsal:
    """Idle share and activations of a schedule.

    Attributes:
        name: the schedule's name.
        formula, simulated, measured: idle share of the ranks, 0 to 1.
        promised, held: most activations of the first stage, as published and as counted.
    """

    name: str
    formula: float
    simulated: float
    measured: float
    promised: int
    held: int


def rehearse(
    comm: Communicator, name: str, micro_batches: int, times: PassTimes, chunks: int
) -> Rehearsal:
    """Runs a schedule once, with a stage on each rank; collective."""
    schedule = SCHEDULES[name]
    layout = Layout((1,) * comm.size)
    pipeline = schedule.pipeline(layout.replicas, micro_batches, chunks)
    chunks = pipeline.chunks
    stage = SleepingStage(times, chunks)
    nothing: Any = _NoWeights()
    replayed, spec = replay(schedule.generate, pipeline), Spec((1,), np.dtype(float))
    runner = Runner(comm, layout, replayed, [stage] * chunks, nothing, spec)
    stage.busy, stage.held, stage.most_held = 0.0, 0, 0  # without the first sample, for shapes
    comm.Barrier()
    start = perf_counter()
    runner.run(_NoData(), Latest(nothing), nothing, lambda number, loss: None)
    ends = comm.allgather((perf_counter() - start, stage.busy))
    seconds = max(end for end, _ in ends)
    idle = 1 - sum(busy for _, busy in ends) / (comm.size * seconds)
    held = comm.bcast(stage.most_held)
    b, w = times.backward_input, times.backward_weight
    return Rehearsal(
        name,
        schedule.bubble(comm.size, micro_batches, chunks, times.forward, b, w),
        simulate(schedule.generate, pipeline, times).bubble,
        idle,
        schedule.held(comm.size, micro_batches, chunks, 0),
        held,
    )


def main() -> int:
    """Prints a row for each schedule."""
    parser = argparse.ArgumentParser(prog="benchmarks.rehearse", description=__doc__)
    add = parser.add_argument
    add("-m", "--micro-batches", type=positive, default=8, help="micro-batches (8)")
    add("--chunks", type=positive, default=2, help="chunks of a stage, for interleaved (2)")
    add("--milliseconds", type=above_zero, default=30.0, help="a forward pass (30)")
    options = parser.parse_args()
    seconds = options.milliseconds / 1e3
    heads = ("formula", "simulated", "measured", "held", "promised")
    with Communicator(MPI.COMM_WORLD) as comm, abort_on_exception(comm):
        if comm.rank == 0:
            print(f"{'schedule':<14}" + "".join(f"{head:>10}" for head in heads))
        for name in SCHEDULES:
            times = PassTimes(seconds, seconds, seconds)
            try:
                one = rehearse(comm, name, options.micro_batches, times, options.chunks)
            except ValueError as error:  # on all ranks, before the first message
                if comm.rank == 0:
                    print(f"{name:<14}{error}")
                continue
            if comm.rank == 0:
                print(
                    f"{name:<14}{one.formula:>10.1%}{one.simulated:>10.1%}{one.measured:>10.1%}"
                    f"{one.held:>10}{one.promised:>10}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
