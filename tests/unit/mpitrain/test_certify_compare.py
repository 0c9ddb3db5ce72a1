"""Verdicts of ``mpitrain certify`` on runs that were made up."""

from dataclasses import replace

import numpy as np
import pytest

from mpitrain.certify.compare import judge, limits
from mpitrain.certify.record import Abstained, Record, Recorded

EPS = 2.0**-52


def record(*, factor=1.0, samples=(0, 1), moved=0.0, loss=1.0, after=1.0, **named):
    values = np.array([1.0, -2.0, 3.0]) * (1 + moved)
    step = Recorded(
        [*samples],
        loss,
        {"a": factor * values, "b": values},
        {"a": (1 - after / 8) * values, "b": values},
    )
    return Record({"a": values}, [step, step], eps=EPS, **named)


RIGHT = record()


def verdict(found, ranks=4):
    return judge(RIGHT, limits(RIGHT, record(moved=EPS)), found, ranks)


@pytest.mark.parametrize(
    ("found", "word", "said"),
    [
        (record(moved=4 * EPS), "PASS", "2 steps"),
        (record(moved=200 * EPS, is_ours=True), "FAIL", "initial parameters a differs"),
        (record(moved=200 * EPS), "ABSTAIN", "initial parameters a differs"),
        (record(factor=4), "FAIL", "gradients of step 1 a is 4 of one process's: a mean over the"),
        (record(factor=0.25), "FAIL", "a is 1/4 of one process's: a mean over the ranks was taken"),
        (record(factor=0), "FAIL", "a is 0 of one process's: it has no part in the sum"),
        (record(after=4), "FAIL", "step 1 a is 4 of one process's: its update is another, as by a"),
        (record(factor=1.001), "FAIL", "a differs by up to 0.003"),
        (record(factor=np.nan), "FAIL", "a differs by up to nan"),
        (record(loss=1.5), "FAIL", "loss of step 1 the loss is 3/2 of one process's"),
        (record(loss=1.5, draws="Dropout"), "ABSTAIN", "Dropout draws random numbers"),
        (record(samples=(0, 0)), "FAIL", "1 of 2 are missing"),
        (record(samples=(0, 7)), "ABSTAIN", "the data differ: 1 of 2"),
        (record(samples=(0, 7), is_ours=True), "FAIL", "samples of step 1"),
        (record(samples=(0, 0, 1, 1)), "PASS", "2 steps, each sample on 2 ranks"),
        (record(samples=(0, 0, 0, 1)), "FAIL", "1 of 4 are missing"),
        (record(samples=(0, 0, 1)), "ABSTAIN", "the data differ: 2 of 3"),
    ],
)
def test_a_verdict_names_what_differs_first(found, word, said):
    got = verdict(found)
    assert got.verdict == word
    assert said in f"{got.where} {got.text}"


def test_a_small_tensor_has_a_limit_of_its_own():
    """A difference that is nothing beside the largest gradient."""

    def with_small(size):
        steps = [replace(s, gradients=s.gradients | {"c": size}) for s in RIGHT.steps]
        return replace(RIGHT, steps=steps)

    small = RIGHT.steps[0].gradients["a"] / 1e6
    own = with_small(small)
    told = judge(own, limits(own, own), with_small(small * (1 + 1e-8)), 4)
    assert (told.verdict, told.where) == ("FAIL", "gradients of step 1")


def test_what_rounding_hides_is_not_called_equal():
    coarse = replace(RIGHT, eps=2.0**-7)
    told = judge(coarse, limits(coarse, coarse), coarse, 4)
    assert told.verdict == "ABSTAIN" and "1 of 1 tensors cannot be compared" in told.text


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (replace(RIGHT, steps=[replace(RIGHT.steps[0], gradients={})]), None, "no gradient of st"),
        (RIGHT, record(samples=(0, 2)), "read different samples"),
        (RIGHT, record(moved=8 * EPS), "different parameters"),
        (RIGHT, record(loss=np.nan), "numbers of one process are not finite"),
    ],
)
def test_one_process_that_differs_from_itself_or_shows_nothing_is_no_reference(one, other, why):
    with pytest.raises(Abstained, match=why):
        limits(one, other or one)
