"""Clients' samples, rounds, exact means and codes of changes, each against its closed form."""

from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.config import ConfigError, Federated
from mpitrain.federated import codes, exact_mean
from mpitrain.federated.choice import Choice
from mpitrain.federated.loop import FederatedLoop
from mpitrain.federated.split import split

LABELS = np.random.default_rng(0).integers(0, 10, 1000)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "labels"])
@pytest.mark.parametrize("clients", [1, 7, 100])
def test_each_sample_is_one_clients(kind, clients):
    own = Federated(clients=clients, split=kind, labels=10 if clients == 1 else 2)
    parts = split(own, 3, 1000, LABELS)
    assert len(parts) == clients
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
    for part in parts:
        assert len(part) and (np.diff(part) > 0).all()
    again = split(own, 3, 1000, LABELS)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    other = split(own, 4, 1000, LABELS)
    assert clients == 1 or any(not np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


@pytest.mark.parametrize("labels", [1, 2, 3])
def test_clients_have_so_many_classes(labels):
    for part in split(Federated(clients=40, split="labels", labels=labels), 1, 1000, LABELS):
        assert len(np.unique(LABELS[part])) == labels


@pytest.mark.parametrize(
    ("own", "labels", "message"),
    [
        (Federated(clients=1001), LABELS, "federated.clients = 1001 must be at most 1000"),
        (Federated(clients=5, split="labels"), None, "goes by the classes of the samples"),
        (Federated(clients=5, split="labels", labels=11), LABELS, "must be at most 10"),
        (Federated(clients=3, split="labels"), LABELS, "leave some of the 10 classes to nobody"),
        (Federated(clients=999, split="labels"), LABELS, "some get no sample"),
    ],
)
def test_splits_that_cannot_be(own, labels, message):
    with pytest.raises(ConfigError, match=message):
        split(own, 0, 1000, labels)


def test_all_are_asked_and_taken_if_nothing_is_said():
    for own, wanted in (({}, (10, 10, False)), ({"sample": 6, "take": 5, "bits": 8}, (6, 5, True))):
        made = Federated(clients=10, **own)
        assert (made.asked, made.taken, made.is_coded) == wanted
    assert [made.least(n) for n in (3, 6, 7, 300)] == [2, 4, 5, 200]


#: Samples and changes of a tiny population.
SIZES, CHANGES = (1, 2, 5), (Fraction(8), Fraction(-1), Fraction(3))
FEDERATED_MEAN = sum(n * d for n, d in zip(SIZES, CHANGES, strict=True)) / sum(SIZES)


def choice(own, sizes=SIZES, work=None):
    sizes = np.array(sizes)
    return Choice(own, 5, sizes, sizes if work is None else np.array(work))


def estimate(own, drawn):
    """The mean that a round has with these draws, exactly."""
    made = choice(own)
    made.ask = lambda number: np.array(drawn)
    cohort = made.cohort(0)
    return sum(p.weight * CHANGES[p.client] for p in cohort.parts) / Fraction(cohort.weight)


def test_the_sampled_mean_is_unbiased_over_all_samples():
    own = Federated(clients=3, sample=2, scheme="sampled")
    expected = sum(
        Fraction(SIZES[a] * SIZES[b], sum(SIZES) ** 2) * estimate(own, (a, b))
        for a, b in product(range(3), repeat=2)
    )
    assert expected == FEDERATED_MEAN


def test_rounds_are_the_seeds():
    own = Federated(clients=50, sample=10, take=7, spread=1.0, dropout=0.2)
    first = [choice(own, [4] * 50).cohort(n) for n in range(5)]
    assert first == [choice(own, [4] * 50).cohort(n) for n in range(5)]
    assert len({c.asked for c in first}) == 5
    assert all(len(c.asked) == 10 and c.taken <= 7 for c in first)


def test_the_fastest_are_taken():
    made = choice(Federated(clients=300, take=256, spread=0.7), [16] * 300)
    cohort = made.cohort(0)
    times = 16 / made.speeds
    assert cohort.taken == 256
    assert {p.client for p in cohort.parts} == set(np.argsort(times)[:256].tolist())
    assert cohort.seconds == np.sort(times)[255]
    assert np.std(np.log(made.speeds)) == pytest.approx(0.7, rel=0.15)


ALL, CUT = True, False


@pytest.mark.parametrize(
    ("own", "work", "parts", "seconds"),
    [
        # Whoever is cut off sends what it has done.
        ({}, (2, 4, 9), [(0, 2, ALL, 1), (1, 4, ALL, 2), (2, 4, CUT, 5)], 4.0),
        ({"weigh": "work"}, (2, 4, 9), [(0, 2, ALL, 2), (1, 4, ALL, 8), (2, 4, CUT, 20)], 4.0),
        # Clients that have done the most are taken.
        ({"take": 2}, (100, 9, 4), [(1, 4, CUT, 2), (2, 4, ALL, 5)], 4.0),
        # Changes of 10 bytes leave 2 seconds for steps, or none.
        ({"bandwidth": 5.0}, (1, 2, 9), [(0, 1, ALL, 1), (1, 2, ALL, 2), (2, 2, CUT, 5)], 4.0),
        ({"bandwidth": 1.0}, SIZES, [], 0.0),
        ({"bandwidth": 5.0, "deadline": 0.0}, SIZES, [*zip(range(3), SIZES, 3 * [ALL], SIZES)], 7),
    ],
)
def test_a_deadline_sees_steps_and_the_time_in_which_a_change_is_sent(own, work, parts, seconds):
    made = choice(Federated(clients=3, **{"deadline": 4.0} | own), work=work)
    cohort = made.cohort(0, lambda asked: 10 if "bandwidth" in own else 0)
    assert [(p.client, p.steps, p.whole, p.weight) for p in cohort.parts] == parts
    assert cohort.seconds == seconds


@pytest.mark.parametrize(
    ("begin", "losses", "expected"),
    [
        (0.0, (9, 8, 9, 8, 7, 6, 5, 4, 4, 3, 5, 6), [0, 0, *[0.1] * 5, 0, 0, 0, 0.1, 0.2]),
        (0.3, (9, 8, 7, 6, 5, 4, 3), [*[0.3] * 5, 0.2, 0.2]),
    ],
)
def test_the_proximal_term_follows_the_loss(begin, losses, expected):
    """Li et al. 2020, section 5: up by 0.1 when it rises, down after five falls in turn."""
    found = []
    parts = SimpleNamespace(
        config=SimpleNamespace(federated=Federated(clients=2, prox_step=0.1)),
        prox=[begin, np.inf, 0],
    )
    for loss in losses:
        FederatedLoop._adapt(SimpleNamespace(parts=parts), float(loss))
        found.append(round(parts.prox[0], 3))
    assert found == expected


def test_a_client_drawn_twice_counts_twice_and_no_more_than_taken():
    made = choice(Federated(clients=3, sample=3, take=2, scheme="sampled"))
    made.ask = lambda number: np.array([0, 0, 0])
    (part,) = made.cohort(0).parts
    assert (part.draws, part.weight) == (2, 2)


def test_the_most_that_weights_add_up_to():
    for own in ({}, {"weigh": "work"}, {"scheme": "sampled"}):
        made = choice(Federated(clients=3, sample=2, **own))
        assert max(made.cohort(n).weight for n in range(50)) == made.most_weight()
    assert choice(Federated(clients=3, sample=2)).most_weight() == 7


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_exact_mean_has_no_order_and_is_right(dtype):
    rng = np.random.default_rng(1)
    x = rng.normal(size=50).astype(dtype)
    ends = [
        (x + rng.normal(size=50) * 10.0 ** rng.integers(-9, 3, 50)).astype(dtype) for _ in range(9)
    ]
    weights = rng.integers(1, 400, 9).tolist()
    parts = [exact_mean.difference(x, w) for w in ends]
    grid = exact_mean.Grid.of(max(float(np.abs(p[0]).max()) for p in parts), sum(weights))

    def mean(order):
        return grid.mean(sum(weights[i] * grid.words(parts[i]) for i in order), sum(weights))

    first, last = mean(range(9)), mean(reversed(range(9)))
    np.testing.assert_array_equal(first, last)
    for i in range(50):
        true = sum(
            n * (Fraction(float(x[i])) - Fraction(float(w[i])))
            for n, w in zip(weights, ends, strict=True)
        )
        found = Fraction(float(first[0][i])) + Fraction(float(first[1][i]))
        assert abs(found - true / sum(weights)) < Fraction(2.0 ** (grid.exponent - 85))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weight", [1, 3, 1437])
def test_of_one_client_the_server_has_its_weights(dtype, weight):
    rng = np.random.default_rng(2)
    x = (rng.normal(size=2000) * 10.0 ** rng.integers(-6, 2, 2000)).astype(dtype)
    w = (rng.normal(size=2000) * 10.0 ** rng.integers(-6, 2, 2000)).astype(dtype)
    w[:3], x[3:6] = 0, 0
    parts = exact_mean.difference(x, w)
    grid = exact_mean.Grid.of(float(np.abs(parts[0]).max()), weight)
    mean = grid.mean(weight * grid.words(parts), weight)
    np.testing.assert_array_equal(exact_mean.subtract(x, mean).astype(dtype), w)


def coded(own, x, number, seed=9, largest=None):
    """A change as the server has it after it was sent in a round."""
    drawn = codes.Drawn.of(own, seed, number, x.size)
    sent = drawn.sent(x)
    steps = codes.CodeGrid(own.bits, largest or float(np.abs(sent).max()))
    return drawn.back(steps.mean(steps.encode(sent, codes.dice(seed, number, 0)), 1))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("keep", [1.0, 0.3])
def test_codes_are_unbiased(rotate, keep):
    own = Federated(clients=1, rotate=rotate, kept=keep, bits=2)
    x = np.random.default_rng(3).normal(size=20)
    found = np.array([coded(own, x, number) for number in range(2000)])
    error = found.std(axis=0) / np.sqrt(len(found))
    assert (np.abs(found.mean(axis=0) - x) <= 5 * error + 1e-12).all()


def test_rounding_by_chance_has_the_variance_of_its_closed_form():
    steps = codes.CodeGrid(3, 1.0)
    x = np.linspace(-1, 1, 41)
    rng = np.random.default_rng(4)
    found = np.array([steps.mean(steps.encode(x, rng), 1) for _ in range(20000)])
    part = np.mod((x + 1) / steps.width, 1)
    variance = steps.width**2 * part * (1 - part)
    assert (np.abs(found.mean(axis=0) - x) <= 5 * np.sqrt(variance / 20000) + 1e-12).all()
    spread = 5 * steps.width**2 / np.sqrt(20000)
    np.testing.assert_allclose(found.var(axis=0), variance, atol=spread)


def test_numbers_of_the_grid_are_themselves_and_others_are_cut():
    steps = codes.CodeGrid(2, 3.0)
    rng = np.random.default_rng(5)
    grid = np.array([-3.0, -1.0, 1.0, 3.0])
    np.testing.assert_array_equal(steps.mean(steps.encode(grid, rng), 1), grid)
    np.testing.assert_array_equal(steps.mean(steps.encode(grid * 9, rng), 1), [-3, -3, 3, 3])
    for least in (0.0, 5e-324):
        steps = codes.CodeGrid(24, least)
        found = steps.mean(steps.encode(np.array([0.0, least, -least]), rng), 1)
        assert (np.abs(found) <= least).all()
