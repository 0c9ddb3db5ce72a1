"""How long a step takes on a line of much latency: plain sums wait for it, delayed averages do not.

Once on a clock that counts steps, where times are exact, and once on a made-up link in seconds.
"""

from dataclasses import dataclass
from itertools import islice
from time import monotonic

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from collectives import Communicator, delayed
from mpitrain.config import Sync
from mpitrain.parallel.summation import Dense, Summation
from mpitrain.start import start
from mpitrain.sync.delayed import Delayed
from tests.mpi.mpitrain.layouts import mlp
from tests.mpi.mpitrain.test_sync_arithmetic import RATE, gradient, workers

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.at_most(5)]


@dataclass
class Line(Summation):
    """Sums that are there so many steps' time after they have begun.

    Attributes:
        latency: in the time that a step computes.
        now: on that clock.
        waits: whether who looks for a sum goes on only when it is there.
    """

    latency: float
    now: float = 0.0
    waits: bool = False

    def bind(self, summand):
        return OnLine(self, Dense("ring").bind(summand))


class OnLine:
    algorithm, reason = "ring", "a test"

    def __init__(self, line, plan):
        self.line, self.plan = line, plan

    def Start(self):
        self.plan.Start()
        self.due = self.line.now + self.line.latency

    def Test(self):
        line = self.line
        if line.now < self.due:
            if not line.waits:
                return False
            line.now = self.due
        self.plan.Wait()
        return True

    def Wait(self):
        assert self.Test()

    def Free(self):
        self.plan.Free()


def seconds_a_step(comm, latency, delay, steps=40):
    """With gradients that are summed in each step, or updates that are averaged ``delay`` later."""
    line = Line(latency)
    own = workers(comm, summation=lambda: line)
    strategy = Delayed(own, Sync(kind="delayed", period=1, delay=delay))
    for step in range(steps):
        strategy.progress()
        line.now += 1.0  # the step computes
        own.parameters[...] -= RATE * gradient(comm, comm.rank, step)
        line.waits = True
        strategy.after_step(step)
        line.waits = False
    taken = line.now / steps
    line.waits = True
    strategy.drain()
    strategy.close()
    return taken


@pytest.mark.parametrize(
    ("delays", "latencies"),
    [
        pytest.param((4,), (1, 4, 8), marks=pytest.mark.quick_on(3)),
        pytest.param((2, 4, 8), (0, 1, 2, 4, 6, 8, 16), marks=pytest.mark.slow),
    ],
)
def test_the_time_of_a_step_is_flat_until_the_delay_is_used_up(comm, delays, latencies):
    """By the closed form: plain sums 1 + latency, delayed ones max(1, latency / delay)."""
    for latency in latencies:
        assert seconds_a_step(comm, latency, 0) == pytest.approx(1 + latency)
    for delay in delays:
        found = [seconds_a_step(comm, latency, delay) for latency in latencies]
        flat = sum(latency <= delay for latency in latencies)
        assert found[:flat] == [1.0] * flat
        expected = [max(1.0, latency / delay) for latency in latencies]
        # The first exchange is waited for when ``delay`` steps are done: none before it.
        np.testing.assert_allclose(found, expected, rtol=2 * delay / 40)
        assert found[flat:] == sorted(found[flat:])
        assert all(time > 1.0 for time in found[flat:])


@pytest.mark.slow
def test_on_a_line_of_100_ms_a_plain_step_takes_as_long_and_a_delayed_one_does_not(comm):
    """In seconds, of the trainer's steps; bounds that a busy machine keeps."""
    latency, steps = 0.1, 16
    config = replace(mlp("float32"), train=replace(mlp().train, steps=steps))
    settings = {
        "plain": Sync(),
        "used up": Sync("delayed", period=1, delay=1, agree=steps),
        "flat": Sync("delayed", period=4, delay=steps, agree=steps),
    }
    taken = {}
    link = delayed(f"latency={latency}s,bandwidth=10Gb/s")
    for name, sync in settings.items():
        with (
            Communicator(MPI.COMM_WORLD, transport=link) as far,
            start(far, replace(config, sync=sync)) as trainer,
        ):
            far.Barrier()
            began = monotonic()
            list(islice(trainer.run_epoch(0), steps - 1))
            taken[name] = comm.allreduce(monotonic() - began, op=MPI.MAX)
    assert taken["plain"] >= (steps - 1) * latency
    assert taken["used up"] >= (steps - 3) * latency
    assert taken["flat"] < taken["plain"] / 2
