"""Parameter servers without messages: staleness, quorums, corrections."""

import re
from itertools import permutations

import numpy as np
import pytest

from mpitrain.config import ConfigError, Server, load
from mpitrain.optim.optimizers import SGD
from mpitrain.parallel.arena import DATA
from mpitrain.parallel.store import Piece
from mpitrain.server.account import next_meeting
from mpitrain.server.messages import check_size
from mpitrain.server.roles import Roles, roles
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


def test_no_bound_holds_nobody():
    one = Descent([0.0], 2, bound="none")
    for clock in range(50):
        one.pull(0, clock)
        one.push(0, clock, [1.0])
    one.pull(1, 0)
    told = one.push(1, 0, [1.0])
    assert (told.lag, told.behind) == (0, 0)


def test_the_lag_counts_pushes_since_the_pull():
    one = Descent([0.0], 2, bound="none")
    one.pull(0, 0)
    one.pull(1, 0)
    assert one.push(1, 0, [1.0]).lag == 0
    one.pull(1, 1)
    assert one.push(1, 1, [1.0]).lag == 0
    told = one.push(0, 0, [1.0])
    assert told.lag == 2
    assert one.shard.clocks == [1, 2] and one.shard.step == 1
    assert one.values[0] == -1.5


def test_a_push_of_several_clocks_has_the_lag_of_the_oldest_parameters():
    one = Descent([0.0], 2, bound="none", push=3)
    one.pull(0, 0)
    one.pull(1, 0)
    one.push(1, 0, [1.0], clocks=3)
    one.pull(0, 1)
    one.pull(0, 2)
    told = one.push(0, 0, [1.0], clocks=3)
    assert told.lag == 1
    assert one.shard.clocks == [3, 3]


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


def test_one_worker_looks_nowhere_ahead():
    one = Descent([1.0, -0.0], 1, momentum=0.5, bound="none", correct="predict")
    for clock in range(3):
        one.pull(0, clock)
        np.testing.assert_array_equal(one.sent[0], one.values)
        one.push(0, clock, [1.0, 0.0])


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
    assert found == Roles(workers=5, servers=2, groups=2)
    assert [list(found.members(group)) for group in range(2)] == [[0, 1], [2, 3, 4]]
    assert found.leaders() == [0, 2] and [found.group(rank) for rank in range(5)] == [0, 0, 1, 1, 1]
    assert [found.is_server(rank) for rank in range(7)] == [False] * 5 + [True] * 2
    assert found.server(1) == 6
    assert str(found) == "5 workers in 2 groups, 2 servers"
    assert str(roles(Server(ranks=1), 3)) == "2 workers, 1 server"
    assert roles(Server(ranks=1, bound=0), 12).groups == 11
    assert roles(Server(ranks=1), 10).groups == 9


def test_parts_that_fit_into_no_message_are_refused():
    check_size(10**9, 2, np.float32)
    with pytest.raises(ConfigError, match=r"server.ranks = 1: .* take 2 servers or more"):
        check_size(10**9, 1, np.float32)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["server.fetch=2"], "server.fetch: a bound counts clocks"),
        (["server.push=2"], "server.push: a bound counts clocks"),
        (["server.bound=0", "server.correct=predict"], "server.correct: server.bound = 0 has no"),
        (["server.correct=predict", "optim.momentum=0"], "server.correct: predict looks ahead"),
        (["server.quorum=0.5"], "server.quorum: one server leaves out late pushes; set ranks = 1"),
        (["server.correct=rate"], "server.correct = 'rate' has gone; set a smaller server.bound"),
        (["server.bound=-2"], "server.bound: expected a whole number >= -1"),
        (["server.bound=many"], "server.bound = 'many': unknown value; expected one of"),
        (["server.servers=2"], "server.servers: unknown key"),
        (["compress.codec=bf16", "compress.start=3"], "compress.start: a push to a server is"),
        (["compress.codec=bf16", "compress.least=3"], "compress.least: a push to a server is"),
        (["parallel.replicas=[2]"], "parallel.replicas: the ranks that are no servers are the"),
        (["parallel.data=2"], "parallel.data: the ranks that are no servers are the workers"),
    ],
)
def test_what_does_not_go_with_servers(tmp_path, overrides, message):
    (tmp_path / "job.toml").write_text("[server]\nranks = 1\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path / "job.toml", overrides)
