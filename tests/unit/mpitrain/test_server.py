"""Parameter servers without messages: staleness, quorums, corrections."""

from itertools import permutations

import numpy as np
import pytest

from mpitrain.config import ConfigError, Server
from mpitrain.optim.optimizers import SGD
from mpitrain.parallel.arena import DATA
from mpitrain.parallel.store import Piece
from mpitrain.server.account import next_meeting
from mpitrain.server.messages import check_size
from mpitrain.server.roles import roles
from mpitrain.server.shard import Shard


class Descent:
    """A shard of plain numbers under gradient descent, with its table."""

    def __init__(self, values, workers, momentum=0.0, **server):
        self.table = Server(ranks=1, **server)
        self.values = np.array(values, np.float32)
        self.state = {"velocity": np.zeros_like(self.values)}
        piece = Piece(0, self.values, np.zeros_like(self.values), DATA)
        self.rates = []

        def update(rate, step):
            self.rates.append(rate)
            optimizer = SGD(momentum)
            direction = optimizer.prepare(self.values, piece.gradients, self.state, 1)
            optimizer.apply(self.values, direction, self.state, rate)

        self.shard = Shard(
            piece, self.state, update, lambda step: 0.5, workers, self.table.limit,
            self.table.needed(workers), self.table.correct == "predict",
        )  # fmt: skip
        self.sent = [np.empty_like(self.values) for _ in range(workers)]

    def pull(self, worker, clock):
        assert self.shard.may_pull(worker)
        self.shard.pull(worker, self.sent[worker])

    def push(self, worker, clock, gradient, clocks=1):
        gradient = np.array(gradient, np.float32)
        return self.shard.push(worker, clock, clocks, gradient)


def test_a_worker_waits_while_it_is_further_ahead_than_the_bound():
    one = Descent([0.0], 3, bound=2)
    for clock in range(3):
        one.pull(0, clock)
        assert one.push(0, clock, [1.0]).behind == clock
    assert not one.shard.may_pull(0)
    assert one.shard.may_pull(1) and one.shard.may_pull(2)
    one.pull(1, 0)
    one.push(1, 0, [1.0])
    assert not one.shard.may_pull(0), "worker 2 is at clock 0"
    one.pull(2, 0)
    one.push(2, 0, [1.0])
    assert one.shard.may_pull(0)
    one.pull(0, 3)
    assert one.push(0, 3, [1.0]).behind == 2


@pytest.mark.parametrize(
    ("push", "moves", "lags", "clocks"),
    [
        (1, "pull 0, pull 1, push 1, pull 1, push 1, push 0", [0, 0, 2], [1, 2]),
        (3, "pull 0, pull 1, push 1, pull 0, pull 0, push 0", [0, 1], [3, 3]),
    ],
)
def test_the_lag_counts_pushes_since_the_oldest_pull(push, moves, lags, clocks):
    one, found = Descent([0.0], 2, bound="none", push=push), []
    for move in moves.split(", "):
        worker = int(move[-1])
        if move.startswith("pull"):
            one.pull(worker, 0)
        else:
            found.append(one.push(worker, one.shard.clocks[worker], [1.0], push).lag)
    assert (found, one.shard.clocks) == (lags, clocks)


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_without_lag_gradients_are_summed_in_the_order_of_the_workers(order):
    """Whatever order they come in: in float32, another sum would have other bits."""
    gradients = [[1e8], [3.0], [-1e8]]
    one = Descent([1.0], 3, bound=0)
    for worker in order:
        one.pull(worker, 0)
    for worker in order:
        assert one.values[0] == 1.0 and not one.rates
        told = one.push(worker, 0, gradients[worker])
        assert (told.lag, told.behind) == (0, 0)
    total = np.float32(1e8) + np.float32(3.0) + np.float32(-1e8)
    assert one.values[0] == np.float32(1.0) - np.float32(0.5) * total
    assert one.rates == [0.5]
    assert one.shard.squares == {0: float(total) ** 2}


@pytest.mark.parametrize(
    ("quorum", "workers", "needed"),
    [(0.95, 20, 19), (0.95, 40, 38), (0.95, 2, 2), (0.5, 3, 2), (0.01, 4, 1), (1.0, 7, 7)],
)
def test_a_quorum_is_rounded_up(quorum, workers, needed):
    assert Server(ranks=1, bound=0, quorum=quorum).needed(workers) == needed


def test_a_quorum_steps_without_the_last_and_drops_what_comes_late():
    one = Descent([0.0], 3, bound=0, quorum=0.6)
    for worker in range(3):
        one.pull(worker, 0)
    one.push(2, 0, [4.0])
    assert one.values[0] == 0 and one.shard.step == 0 and not one.shard.may_pull(2)
    one.push(0, 0, [2.0])
    assert one.values[0] == -0.5 * 6 * 3 / 2 and one.shard.step == 1
    assert one.shard.may_pull(0) and one.shard.may_pull(2)
    assert one.push(1, 0, [99.0]) is None
    assert one.values[0] == -4.5 and one.rates == [0.5]
    one.pull(1, 1)
    one.pull(0, 1)
    assert one.push(1, 1, [1.0]).lag == 0
    one.push(0, 1, [1.0])
    assert one.values[0] == -6 and one.shard.squares == {0: 81.0, 1: 9.0}


def test_momentum_is_looked_ahead_by_the_mean_lag():
    one = Descent([0.0], 2, momentum=0.5, bound="none", correct="predict")
    one.pull(0, 0)
    assert one.sent[0][0] == 0.0  # no velocity yet
    one.push(0, 0, [1.0])  # lag 0: with the usual 1, the mean is 1/2
    one.pull(0, 1)
    assert one.values[0] == -0.5
    assert one.sent[0][0] == -0.5 - 0.5 * 0.5 * 1.0


def test_after_a_meeting_nothing_is_left():
    one = Descent([0.0], 2, bound=1)
    one.pull(0, 0)
    one.push(0, 0, [1.0])
    one.shard.meet(7)
    assert (one.shard.clocks, one.shard.version, one.shard.step) == ([7, 7], 0, 7)
    one.pull(1, 7)
    told = one.push(1, 7, [1.0])
    assert (told.lag, told.behind) == (0, 0)


@pytest.mark.parametrize(
    ("end", "window", "every", "meetings"),
    [
        (10, 4, 0, [4, 8, 10]),
        (10, 64, 3, [3, 6, 9, 10]),
        (10, 4, 6, [4, 6, 8, 10]),
        (3, 64, 0, [3]),
    ],
)
def test_ranks_meet_at_multiples(end, window, every, meetings):
    found = [0]
    while found[-1] < end:
        found.append(next_meeting(found[-1], end, window, every))
    assert found[1:] == meetings


def test_roles():
    found = roles(Server(ranks=2, groups=2), 7)
    assert [list(found.members(group)) for group in range(2)] == [[0, 1], [2, 3, 4]]
    assert found.leaders() == [0, 2] and [found.group(rank) for rank in range(5)] == [0, 0, 1, 1, 1]
    assert [found.is_server(rank) for rank in range(7)] == [False] * 5 + [True] * 2
    assert found.server(1) == 6
    assert str(found) == "5 workers in 2 groups, 2 servers"
    assert roles(Server(ranks=1, bound=0), 12).groups == 11
    assert roles(Server(ranks=1), 10).groups == 9


def test_parts_that_fit_into_no_message_are_refused():
    check_size(10**9, 2, np.float32)
    with pytest.raises(ConfigError, match=r"server.ranks = 1: .* take 2 servers or more"):
        check_size(10**9, 1, np.float32)
