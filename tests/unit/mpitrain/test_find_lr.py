"""Which rate a search suggests, and how it says so."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mpitrain.commands.find_lr import suggestion, table
from mpitrain.config import expect_read, load
from mpitrain.metrics.records import Step
from mpitrain.training.find_lr import RangeTest, Tried, _run, shortened


def found(losses):
    """With a rate ten times that of the step before."""
    return RangeTest([Tried(10.0 ** (i - 5), x, x) for i, x in enumerate(losses)], "all were done")


def test_the_steepest_fall_and_a_tenth_of_the_least():
    search = found([5.0, 4.9, 4.5, 2.5, 2.4, 8.0, 3.0])
    assert (search.steepest, search.tenth) == (pytest.approx(1e-3), pytest.approx(1e-2))
    assert suggestion(search).startswith("try optim.lr=0.01, a tenth of the rate where the loss")
    assert suggestion(search).endswith("it falls the most about 0.001")


def test_a_fall_from_one_step_to_the_next_is_no_trend():
    losses = [4.0, 3.0, 4.0] + [4.0] * 17 + [4.0 - 0.1 * i for i in range(30)] + [9.0] * 5
    tried = [Tried(1.1**i, x, x) for i, x in enumerate(losses)]
    assert 1.1**20 <= RangeTest(tried, "").steepest <= 1.1**50


@pytest.mark.parametrize("losses", [[], [3.0], [3.0, 3.5, 9.0], [3.0, 3.0]])
def test_a_loss_that_has_not_fallen_suggests_nothing(losses):
    search = found(losses)
    assert search.steepest is None and search.tenth is None
    assert suggestion(search).startswith("the loss has not fallen: try a smaller --least")
    assert f"ended after {len(losses)} steps: all were done" in table(search)


def test_a_run_ends_where_a_loss_below_0_has_risen_far_above_the_least():
    """It is above four times its least from the first step on."""
    losses = [-1.0, -1.1, -1.2, 2.0, 9.0, 40.0, 0.0]
    parts = SimpleNamespace(steps_done=0, total_steps=len(losses), epoch=0)
    nothing = dict.fromkeys(Step.__struct_fields__, 0)

    def run_epoch(epoch):
        for parts.steps_done, loss in enumerate(losses, 1):
            yield Step(**nothing | {"step": parts.steps_done, "loss": loss})

    tried, why = _run(SimpleNamespace(parts=parts, run_epoch=run_epoch), losses)
    assert (len(tried), why) == (6, "the loss was above its least by more than 3 times its size")


def test_the_short_job_sets_nothing_that_it_does_not_read():
    expect_read(shortened(load(Path("digits_mlp")), 10))
