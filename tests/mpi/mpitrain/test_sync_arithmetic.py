"""Strategies of synchronisation by themselves: exact where numbers do not round, never late."""

from collections import deque

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from mpitrain import nn
from mpitrain.config import Sync
from mpitrain.optim.optimizers import SGD
from mpitrain.parallel.arena import Arena
from mpitrain.parallel.replicas import check_replicas
from mpitrain.parallel.store import Piece
from mpitrain.parallel.summation import Dense, Summation
from mpitrain.sync.delayed import Delayed
from mpitrain.sync.local import Local
from mpitrain.sync.workers import Workers
from tests.cases import slow_case

WIDTHS = (3, 5, 4)
RATE = 1 / 8


def workers(comm, dtype=np.float64, summation=None):
    """A worker a rank, of three layers, whose weights are whole numbers."""
    layers = {f"layer{i}": nn.Linear(width, 1, bias=False) for i, width in enumerate(WIDTHS)}
    shapes = {name: {"weight": (w, 1)} for name, w in zip(layers, WIDTHS, strict=True)}
    arena = Arena(layers, shapes)
    parameters = np.arange(arena.size).astype(dtype)
    gradients, velocity = (np.zeros(arena.size, dtype) for _ in range(2))
    return Workers(
        comm=comm, arena=arena, parameters=parameters, gradients=gradients,
        pieces=[Piece(0, parameters, gradients, "data")], state=[{"velocity": velocity}],
        owned=[slice(0, arena.size)], summation=summation or Dense, dense=Dense(),
    )  # fmt: skip


def gradient(comm, worker, step):
    """Gradient of a worker; the mean over the workers is a whole number, and nothing rounds."""
    drawn = np.random.default_rng([worker, step]).integers(-8, 9, sum(WIDTHS))
    return (comm.size * drawn).astype(float)


def mean_gradient(comm, step):
    return sum(gradient(comm, worker, step) for worker in range(comm.size)) / comm.size


def made(workers, sync):
    return (Local if sync.kind == "local" else Delayed)(workers, sync)


#: The mean of the workers is one process with the mean gradient.
STRATEGIES = {
    "local 1": Sync("local", period=1, outer="plain"),
    "local 4": Sync("local", period=4, outer="plain"),
    "local 4, outer 1": Sync("local", period=4, outer="nesterov:lr=1,momentum=0"),
} | {
    f"delayed {period}, {delay}": Sync("delayed", period=period, delay=delay)
    for period, delay in ((1, 0), (1, 1), (1, 4), (3, 0), (3, 2), (3, 3), (2, 7))
}
#: It is not.
OTHERS = {
    "momentum": Sync("local", period=4, outer="momentum:lr=0.5,momentum=0.75"),
    "nesterov": Sync("local", period=4, outer="nesterov"),
} | {
    f"uncorrected {period}, {delay}": Sync("delayed", period=period, delay=delay, correct=False)
    for period, delay in ((1, 0), (3, 0), (1, 4), (3, 2), (2, 7))
}


@pytest.mark.parametrize("dtype", [np.float32, slow_case(np.float64)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_drained_workers_are_the_same_bits_where_numbers_round(comm, name, dtype):
    own = workers(comm, dtype)
    strategy = made(own, STRATEGIES[name])
    draw = np.random.default_rng(comm.rank)
    for step in range(17):
        own.parameters[...] -= (0.1 * draw.standard_normal(own.arena.size)).astype(dtype)
        strategy.after_step(step)
    strategy.drain()
    assert len(set(comm.allgather(own.parameters.tobytes() + strategy.anchor.tobytes()))) == 1
    strategy.close()


@pytest.mark.quick_on(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_one_worker_is_sequential_bit_by_bit(name):
    with Communicator(MPI.COMM_SELF) as one:
        own = workers(one, np.float32)
        strategy = made(own, STRATEGIES[name])
        draw, alone = np.random.default_rng(7), own.parameters.copy()
        exact = name != "local 4, outer 1"  # the outer optimiser has the way, which rounds
        for step in range(17):
            update = (0.1 * draw.standard_normal(own.arena.size)).astype(np.float32)
            own.parameters[...] -= update
            alone -= update
            strategy.after_step(step)
            if exact:
                np.testing.assert_array_equal(own.parameters, alone)
                np.testing.assert_array_equal(strategy.consensus(), alone)
        np.testing.assert_allclose(own.parameters, alone, rtol=1e-6)
        strategy.close()


class Averaging:
    """Changes of the workers' weights after a step, as the papers have them, in one process."""

    def __init__(self, sync, weights):
        self.sync, self.weights, self.queue = sync, weights, deque()
        self.anchor, self.velocity = weights[0].copy(), np.zeros_like(weights[0])
        self.sums = [np.zeros_like(w) for w in weights]
        self.before = [w.copy() for w in weights]
        self.outer, _, options = sync.outer.partition(":")
        given = [float(one.partition("=")[2]) for one in options.split(",") if one]
        self.rate, self.momentum = given or {"plain": (1, 0), "nesterov": (0.7, 0.9)}[self.outer]

    def after(self, step):
        if step < self.sync.start:
            self.anchor[...] = self.weights[0]
        elif self.sync.kind == "local":
            self._local(step + 1 - self.sync.start)
        else:
            self._delayed(step + 1 - self.sync.start)
        for old, new in zip(self.before, self.weights, strict=True):
            old[...] = new

    def _local(self, done):
        if done % self.sync.period:
            return
        way = np.mean([self.anchor - w for w in self.weights], axis=0)
        self.velocity = self.momentum * self.velocity + way
        ahead = way if self.outer == "nesterov" else 0
        again = self.momentum if self.outer == "nesterov" else 1
        self.anchor -= self.rate * (ahead + again * self.velocity)
        for w in self.weights:
            w[...] = self.anchor

    def _delayed(self, done):
        """Literally: the mean takes the place of one's own updates, which may be held back."""
        for total, new, old in zip(self.sums, self.weights, self.before, strict=True):
            total += new - old
        if done % self.sync.period == 0:
            self.queue.append((done, [total.copy() for total in self.sums]))
            for w, total in zip(self.weights, self.sums, strict=True):
                w -= 0 if self.sync.correct else total
                total[...] = 0
        while self.queue and self.queue[0][0] + self.sync.delay == done:
            _, updates = self.queue.popleft()
            for w, update in zip(self.weights, updates, strict=True):
                w += np.mean(updates, axis=0) - (update if self.sync.correct else 0)


#: Their first gradients are averaged, too.
LATER = {
    "post-local": Sync("local", period=4, outer="plain", start=5),
    "delayed, later": Sync("delayed", period=1, delay=4, start=1),
}


@pytest.mark.parametrize("name", [*STRATEGIES, *LATER, *OTHERS])
def test_weights_are_those_of_the_papers_at_every_step(comm, name):
    sync = (STRATEGIES | LATER | OTHERS)[name]
    own = workers(comm)
    strategy = made(own, sync)
    weights = [own.parameters.copy() for _ in range(comm.size)]
    averaging, one_process = Averaging(sync, weights), own.parameters.copy()
    close = dict(rtol=0, atol=1e-12 if averaging.momentum else 0)
    for step in range(23):
        mean = mean_gradient(comm, step)
        one_process -= RATE * mean
        for worker, w in enumerate(weights):
            w -= RATE * (mean if step < sync.start else gradient(comm, worker, step))
        averaging.after(step)
        own.gradients[...] = gradient(comm, comm.rank, step)
        if step < sync.start:
            own.gradients[...] = strategy.mean(own.gradients)
        own.parameters[...] -= RATE * own.gradients
        strategy.progress()
        strategy.after_step(step)
        np.testing.assert_allclose(own.parameters, weights[comm.rank], **close)
        together = sum(weights) / comm.size
        np.testing.assert_allclose(strategy.consensus(), together, **close)
        if name not in OTHERS:
            np.testing.assert_array_equal(together, one_process)
        if sync.kind == "local":
            np.testing.assert_allclose(strategy.anchor, averaging.anchor, **close)
        elif comm.size > 1:
            assert list(strategy.rounds) == [done for done, _ in averaging.queue]
            assert len(averaging.queue) <= -(-sync.delay // sync.period)
        shared = {name: values.copy() for name, values in strategy.shared.items()}
        check_replicas(comm, [(comm, shared)], f"after step {step}")
    strategy.drain()
    for found in (own.parameters, strategy.anchor):
        np.testing.assert_allclose(found, together, **close)
    strategy.close()


@pytest.mark.mpi(min_size=2)
def test_the_optimisers_state_is_averaged_where_that_is_asked_for(comm):
    """With the velocity averaged, too, H = 1 is one process with momentum."""
    own = workers(comm)
    strategy = Local(own, Sync(kind="local", period=1, outer="plain", state="averaged"))
    momentum = SGD(momentum=0.5)
    expected, velocity = own.parameters.copy(), {"velocity": np.zeros(12)}
    for step in range(11):
        g = gradient(comm, comm.rank, step)
        direction = momentum.prepare(own.parameters, g, own.state[0], step + 1)
        momentum.apply(own.parameters, direction, own.state[0], RATE)
        strategy.after_step(step)
        direction = momentum.prepare(expected, mean_gradient(comm, step), velocity, step + 1)
        momentum.apply(expected, direction, velocity, RATE)
        # The mean velocity is no multiple of the workers: on 3 and 5 its parts round.
        close = dict(rtol=0, atol=0 if comm.size in (2, 4, 8) else 1e-12)
        np.testing.assert_allclose(own.parameters, expected, **close)
        np.testing.assert_allclose(own.state[0]["velocity"], velocity["velocity"], **close)
    strategy.close()


class Late(Summation):
    """A link on which what was sent in a step is seen ``delay`` steps later, and not before."""

    def __init__(self, delay):
        self.delay, self.step, self.waits = delay, 0, []  # for sums not to be seen yet

    def bind(self, summand):
        return LateSum(self, Dense("ring").bind(summand))


class LateSum:
    algorithm, reason = "ring", "a test"

    def __init__(self, link, plan):
        self.link, self.plan = link, plan

    def Start(self):
        self.plan.Start()
        self.sent = self.link.step

    def Test(self):
        if self.link.step < self.sent + self.link.delay:
            self.link.waits.append((self.sent, self.link.step))
            if len(self.link.waits) > 10_000:
                raise AssertionError(f"waits in step {self.link.step} for one of {self.sent}")
            return False
        self.plan.Wait()
        return True

    def Free(self):
        self.plan.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("late", [slow_case(0), 3, 6])
def test_nobody_waits_for_what_is_not_due(comm, late):
    """A link of ``late`` steps, and exchanges that take effect ``late`` steps later."""
    link = Late(late)
    own = workers(comm, summation=lambda: link)
    plain = workers(comm, summation=lambda: Dense("ring"))
    sync = Sync("delayed", period=2, delay=late)
    strategy, other = made(own, sync), made(plain, sync)
    for step in range(20):
        link.step = step
        strategy.progress()  # once while a step computes
        looked = len(link.waits)
        for one in (strategy, other):
            one.workers.parameters[...] -= RATE * gradient(comm, comm.rank, step)
            one.after_step(step)
        assert len(link.waits) == looked, "after_step looked again: it waited"
        np.testing.assert_array_equal(own.parameters, plain.parameters)
    link.step += late
    for one in (strategy, other):
        one.drain()
        one.close()
    assert not late or len(link.waits) > 0


@pytest.mark.mpi(min_size=2)
def test_a_link_that_is_slower_than_the_delay_is_waited_for(comm):
    link = Late(4)
    own = workers(comm, summation=lambda: link)
    strategy = Delayed(own, Sync(kind="delayed", period=2, delay=3))
    with pytest.raises(AssertionError, match="waits in step 4"):
        for step in range(9):
            link.step = step
            strategy.after_step(step)
    link.step += 9
    strategy.quiesce()
    strategy.close()
