"""Verdicts of ``mpitrain certify`` on runs that were made up."""

from dataclasses import replace

import numpy as np
import pytest

from mpitrain.certify.compare import judge, limits
from mpitrain.certify.record import Abstained, Record, Recorded

EPS = 2.0**-52


def record(*, factor=1.0, samples=(0, 1), moved=0.0, loss=1.0, **named):
    values = np.array([1.0, -2.0, 3.0]) * (1 + moved)
    step = Recorded(
        [*samples], loss, {"a": factor * values, "b": values}, {"a": values, "b": values}
    )
    return Record({"a": values}, [step, step], eps=EPS, **named)


RIGHT = record()


def verdict(found, ranks=4):
    return judge(
        RIGHT, limits(RIGHT, replace(record(moved=EPS), initial=RIGHT.initial)), found, ranks
    )


@pytest.mark.parametrize(
    ("found", "word", "said"),
    [
        (record(moved=20 * EPS), "PASS", "2 steps"),
        (record(moved=200 * EPS, is_ours=True), "FAIL", "initial parameters a differs"),
        (record(moved=200 * EPS), "ABSTAIN", "initial parameters a differs"),
        (record(factor=4), "FAIL", "gradients of step 1 a is 4 of one process's: a mean over the"),
        (record(factor=0.25), "FAIL", "a is 1/4 of one process's: a mean over the ranks was taken"),
        (record(factor=0), "FAIL", "a is 0 of one process's: it has no part in the sum"),
        (record(factor=1.001), "FAIL", "a differs by up to 0.003"),
        (record(factor=np.nan), "FAIL", "a differs by up to nan"),
        (record(loss=1.5), "FAIL", "loss of step 1 the loss is 3/2 of one process's"),
        (record(loss=1.5, draws="Dropout"), "ABSTAIN", "Dropout draws random numbers"),
        (record(samples=(0, 0)), "FAIL", "1 of 2 are missing"),
        (record(samples=(0, 7)), "ABSTAIN", "the data differ: 1 of 2"),
        (record(samples=(0, 7), is_ours=True), "FAIL", "samples of step 1"),
        (record(samples=(0, 0, 1, 1)), "PASS", "2 steps"),
        (record(samples=(0, 0, 0, 1)), "FAIL", "1 of 4 are missing"),
        (record(samples=(0, 0, 1)), "ABSTAIN", "the data differ: 2 of 3"),
    ],
)
def test_a_verdict_names_what_differs_first(found, word, said):
    got = verdict(found)
    assert got.verdict == word
    assert said in f"{got.where} {got.text}"


@pytest.mark.parametrize("moved", [record(samples=(0, 2)), record(moved=EPS), record(loss=np.nan)])
def test_one_process_that_differs_from_itself_is_no_reference(moved):
    with pytest.raises(Abstained):
        limits(RIGHT, moved)
