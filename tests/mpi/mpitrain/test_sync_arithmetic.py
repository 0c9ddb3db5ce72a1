"""Strategies of synchronisation by themselves: exact where numbers do not round, never late."""

from collections import deque
from dataclasses import dataclass, field

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
    gradients = np.zeros(arena.size, dtype)
    velocity = np.zeros(arena.size, dtype)
    return Workers(
        comm=comm,
        arena=arena,
        parameters=parameters,
        gradients=gradients,
        pieces=[Piece(0, parameters, gradients, "data")],
        state=[{"velocity": velocity}],
        owned=[slice(0, arena.size)],
        summation=summation or Dense,
        dense=Dense(),
    )


def gradient(comm, worker, step):
    """Of a worker; the mean over the workers is a whole number, and nothing rounds."""
    drawn = np.random.default_rng([worker, step]).integers(-8, 9, sum(WIDTHS))
    return (comm.size * drawn).astype(float)


def mean_gradient(comm, step):
    return sum(gradient(comm, worker, step) for worker in range(comm.size)) / comm.size


def run(comm, strategy, steps, after=lambda step: None):
    """Plain gradient descent of each worker."""
    own = strategy.workers
    for step in range(steps):
        own.parameters[...] -= RATE * gradient(comm, comm.rank, step)
        strategy.progress()
        strategy.after_step(step)
        shared = {name: values.copy() for name, values in strategy.shared.items()}
        check_replicas(comm, [(comm, shared)], f"after step {step}")
        after(step)


def made(workers, sync):
    return (Local if sync.kind == "local" else Delayed)(workers, sync)


STRATEGIES = {
    "local 1": Sync("local", period=1, outer="plain"),
    "local 4": Sync("local", period=4, outer="plain"),
    "local 4, outer 1": Sync("local", period=4, outer="nesterov:lr=1,momentum=0"),
} | {
    f"delayed {period}, {delay}": Sync("delayed", period=period, delay=delay)
    for period, delay in ((1, 0), (1, 1), (1, 4), (3, 0), (3, 2), (3, 3), (2, 7))
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_mean_of_the_workers_is_one_process_at_every_step(comm, name):
    own = workers(comm)
    strategy = made(own, STRATEGIES[name])
    expected = own.parameters.copy()

    def compare(step):
        nonlocal expected
        expected = expected - RATE * mean_gradient(comm, step)
        mean = comm.allreduce(own.parameters) / comm.size
        np.testing.assert_array_equal(mean, expected)
        np.testing.assert_array_equal(strategy.consensus(), expected)

    run(comm, strategy, 23, compare)
    strategy.drain()
    np.testing.assert_array_equal(own.parameters, expected)
    np.testing.assert_array_equal(strategy.anchor, expected)
    strategy.close()


@pytest.mark.parametrize(("period", "delay"), [(1, 0), (3, 0), (1, 4), (3, 2), (2, 7)])
def test_without_correction_weights_move_by_means_alone(comm, period, delay):
    """One process: updates of a period are taken back at its end; their mean comes later."""
    own = workers(comm)
    strategy = made(own, Sync("delayed", period=period, delay=delay, correct=False))
    common, updates, due = own.parameters.copy(), np.zeros(own.arena.size), deque()

    def compare(step):
        nonlocal updates
        updates = updates - RATE * mean_gradient(comm, step)
        if due and due[0][0] == step:
            common[...] += due.popleft()[1]
        if (step + 1) % period == 0:
            due.append((step + delay, updates))
            updates = np.zeros(own.arena.size)
            if not delay:
                common[...] += due.popleft()[1]
        mean = comm.allreduce(own.parameters) / comm.size
        np.testing.assert_array_equal(mean, common + updates)
        np.testing.assert_array_equal(strategy.consensus(), common + updates)

    run(comm, strategy, 23, compare)
    strategy.close()


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
    found = comm.allgather(own.parameters.tobytes() + strategy.anchor.tobytes())
    assert len(set(found)) == 1
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
    """What workers do with their weights after a step, as the papers have it, in one process."""

    def __init__(self, sync, weights):
        self.sync, self.weights, self.queue = sync, weights, deque()
        self.anchor, self.velocity = weights[0].copy(), np.zeros_like(weights[0])
        self.sums = [np.zeros_like(w) for w in weights]
        self.before = [w.copy() for w in weights]
        self.outer = sync.outer.partition(":")[0]
        outers = {"plain": (1, 0), "momentum": (0.5, 0.75), "nesterov": (0.7, 0.9)}
        self.rate, self.momentum = outers[self.outer]

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
        """Literally: the mean takes the place of one's own updates."""
        for total, new, old in zip(self.sums, self.weights, self.before, strict=True):
            total += new - old
        if done % self.sync.period == 0:
            self.queue.append((done, [total.copy() for total in self.sums]))
            for total in self.sums:
                total[...] = 0
        while self.queue and self.queue[0][0] + self.sync.delay == done:
            _, updates = self.queue.popleft()
            for w, update in zip(self.weights, updates, strict=True):
                w += np.mean(updates, axis=0) - update


OUTERS = ("plain", "momentum:lr=0.5,momentum=0.75", "nesterov")
SYNCS = [Sync("local", period=4, outer=outer) for outer in OUTERS]
SYNCS += [
    Sync("delayed", period=period, delay=delay)
    for period, delay in ((1, 0), (1, 3), (3, 2), (2, 5), (4, 4))
]


@pytest.mark.parametrize("sync", SYNCS, ids=str)
def test_weights_are_those_of_the_papers(comm, sync):
    own = workers(comm)
    strategy = made(own, sync)
    weights = [own.parameters.copy() for _ in range(comm.size)]
    averaging = Averaging(sync, weights)
    close = dict(rtol=0, atol=0 if sync.kind == "delayed" else 1e-12)

    def compare(step):
        for worker, w in enumerate(weights):
            w -= RATE * gradient(comm, worker, step)
        averaging.after(step)
        np.testing.assert_allclose(own.parameters, weights[comm.rank], **close)
        if sync.kind == "local":
            np.testing.assert_allclose(strategy.anchor, averaging.anchor, **close)
        elif comm.size > 1:
            assert list(strategy.rounds) == [done for done, _ in averaging.queue]
            assert len(averaging.queue) <= -(-sync.delay // sync.period)

    run(comm, strategy, 22, compare)
    strategy.quiesce()
    strategy.close()


def test_first_steps_are_those_of_one_process(comm):
    """Post-local SGD: the gradients are averaged, then the weights."""
    own = workers(comm)
    strategy = Local(own, Sync(kind="local", period=4, outer="plain", start=5))

    expected = own.parameters.copy()
    for step in range(13):
        own.gradients[...] = gradient(comm, comm.rank, step)
        if step < 5:
            own.gradients[...] = strategy.mean(own.gradients)
        own.parameters[...] -= RATE * own.gradients
        strategy.after_step(step)
        expected = expected - RATE * mean_gradient(comm, step)
        if step < 5 or step in (8, 12):
            np.testing.assert_array_equal(own.parameters, expected)
        elif comm.size > 1:
            assert not np.array_equal(own.parameters, expected)
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


@dataclass
class Late(Summation):
    """A link on which what was sent in a step is seen so many steps later, and not before.

    Attributes:
        delay: steps.
        step: of the run.
        waits: for sums that were not to be seen yet.
    """

    delay: int
    step: int = 0
    waits: list = field(default_factory=list)

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
