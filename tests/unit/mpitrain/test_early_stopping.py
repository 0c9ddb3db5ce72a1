"""Which test is the best, and when training ends before its last step."""

import math

import pytest

from mpitrain.config import Checkpoint, Config, Evaluate
from mpitrain.metrics.records import Epoch
from mpitrain.training.early_stopping import Seen, Watch


def watching(best="", patience=0, watch="loss", metrics=("accuracy", "mae", "score")):
    evaluate = Evaluate(patience=patience, watch=watch)
    return Watch(Config(checkpoint=Checkpoint(best=best), evaluate=evaluate), metrics)


def told(watch, name, values):
    """For each test, whether it is the best so far."""
    found = []
    for index, value in enumerate(values, 1):
        loss = value if name == "loss" else 0.0
        metrics = {"accuracy": 0.5, "mae": 1.0, "score": 2.0, name: value}
        watch.note(Epoch(index - 1, loss, metrics), 10 * index)
        found.append(watch.is_best())
    return found


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "text", "values", "best"),
    [
        ("loss", "loss", [3, 2, 2.5, 2, 1], [1, 1, 0, 0, 1]),
        ("accuracy", "accuracy", [0.3, 0.2, 0.4, 0.4], [1, 0, 1, 0]),
        ("mae", "mae", [3, 4, 2], [1, 0, 1]),
        ("score", "higher score", [3, 4, 2], [1, 1, 0]),
        ("score", "lower score", [3, 4, 2], [1, 0, 1]),
        ("accuracy", "accuracy", [NAN, 0.2, NAN, 0.3, INF], [0, 1, 0, 1, 0]),
        ("score", "lower score", [-INF, NAN], [0, 0]),
    ],
)
def test_the_best_so_far(name, text, values, best):
    assert told(watching(best=text), name, values) == [bool(b) for b in best]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([3, 2, 4, 4], "no better loss in 2 tests than 2 after step 20"),
        ([3, 2, 4, 1, 1.5], ""),
        ([3, 3, 3], "no better loss in 2 tests than 3 after step 10"),
        ([3, NAN, NAN], "no better loss in 2 tests than 3 after step 10"),
        ([NAN, NAN], "no finite loss in 2 tests"),
        ([2, 3], ""),
    ],
)
def test_patience(values, reason):
    watch = watching(patience=2)
    assert not watch.ended()
    told(watch, "loss", values)
    assert watch.ended() == reason


def test_a_test_that_a_longer_run_would_not_have_may_be_the_best_and_costs_no_patience():
    watch = watching(best="mae", patience=2)
    told(watch, "mae", [3])
    for mae, loss in ((2.0, -1.0), (4.0, 1.0)):
        watch.note(Epoch(1, loss, {"mae": mae}), 15, counts=False)
    assert watch.seen == {"mae": Seen(2.0, 15), "loss": Seen(0.0, 10)}
