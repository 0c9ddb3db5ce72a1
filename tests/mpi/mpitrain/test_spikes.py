"""Spikes of the loss: all ranks go back to the newest checkpoint, and leave batches out."""

from pathlib import Path

import numpy as np
import pytest

from mpitrain.checkpoint.folders import numbered
from mpitrain.checkpoint.saving import checkpoints
from mpitrain.config import ConfigError
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Back, Epoch, Saved, Start, Step
from mpitrain.ranks.stop import Stopped
from mpitrain.run import train
from mpitrain.start import start
from mpitrain.update.agreement import NonFinite
from tests.mpi.mpitrain.layouts import RANKS, StopsAfter, changed, equal, in_folder, job, whole

pytestmark = pytest.mark.at_most(5)

SPIKE = {"on_spike": "skip", "spike_window": 4, "checkpoint": {"every": 3, "keep": 3}}


def spiked(folder, **keys):
    parallel = {"zero": 2} if RANKS % 2 else {"pipe": 2}
    config = in_folder(job("mlp", batch_size=144, micro_batches=2, **parallel), folder)
    return changed(config, **(SPIKE | keys))


def run(comm, config, at=(), value=1e3, left_out=(), stop=None, known=None, **how):
    """Train; the parameters are multiplied by ``value`` just before the steps ``at``."""
    met = []

    def spoil(parts):
        number = parts.steps_done + 1
        if number in at and met.count(number) < (1 if value else 99):
            met.append(number)
            for piece in parts.store.pieces:
                piece.parameters[...] *= value or np.nan
            parts.refresh()

    flag = StopsAfter(stop)
    with start(comm, config, before_step=spoil, stop=flag) as trainer:
        flag.trainer = trainer
        if known is not None:
            known.append(trainer.parts)
        if left_out:
            trainer.parts.spikes.left_out = {*left_out}
        return whole(comm, trainer), train(trainer, **how).test_loss


def spoils(step, values, factor):
    """How to run so that some values of the first piece become others after a step, once."""
    met, parts = [], []

    def spoil(record):
        if isinstance(record, Step) and record.step == step and not met:
            met.append(step)
            parts[0].store.pieces[0].parameters[values] *= factor
            parts[0].refresh()

    return {"on_record": spoil, "known": parts}


def records(config):
    return read_records(checkpoints(config).parent / "metrics.jsonl")


@pytest.mark.parametrize("value", [1e3, np.inf], ids=["large", "not finite"])
def test_a_run_with_a_spike_ends_as_one_that_left_its_batch_out(comm, folder, value):
    """The spike comes once, behind a checkpoint and a test."""
    expected, test_loss = run(comm, spiked(folder / "even"), left_out=[14])
    config = spiked(folder / "spike")
    found, other_loss = run(comm, config, at=[14], value=value)
    equal(found, expected)
    assert other_loss == test_loss
    log = records(config)
    (back,) = log.of(Back)
    assert (back.step, back.spike, back.left_out, back.times) == (12, 14, [14], 1)
    steps = [record.step for record in log.of(Step)]
    assert steps.count(13) == 2 and steps[-1] == 20
    assert [test.epoch for test in log.of(Epoch)] == [0, 1]


@pytest.mark.parametrize(("policy", "left_out"), [("repeat", []), ("skip_all", [13, 14, 15])])
def test_a_policy_says_which_batches_are_left_out(comm, folder, policy, left_out):
    """A spike of two steps, in which no checkpoint is written."""
    keys = {"on_spike": policy, "spike_steps": 2, "spike_factor": 1.5}
    expected = run(comm, spiked(folder / "even", **keys), left_out=left_out or [99])
    config = spiked(folder / "spike", **keys)
    equal(run(comm, config, at=[14], value=30.0)[0], expected[0])
    (back,) = records(config).of(Back)
    assert (back.step, back.spike, back.left_out) == (12, 15, left_out)


def test_a_run_that_is_stopped_after_it_went_back_leaves_the_same_batches_out(comm, folder):
    expected = run(comm, spiked(folder / "even"), left_out=[8, 14])
    config = spiked(folder / "spike")
    with pytest.raises(Stopped):
        run(comm, config, at=[8], stop=11)
    equal(run(comm, config, at=[14], go_on=True)[0], expected[0])
    assert [back.times for back in records(config).of(Back)] == [1, 2]
    assert 18 in numbered(checkpoints(config))


class Killed(Exception):
    """The end of a run without a last checkpoint."""


def test_a_run_that_is_killed_after_it_went_back_leaves_the_same_batches_out(comm, folder):
    expected = run(comm, spiked(folder / "even"), left_out=[14])
    config = spiked(folder / "spike")

    def kill(record):
        if isinstance(record, Step) and record.step == 13 and log:
            raise Killed
        log.extend([record] * isinstance(record, Back))

    log = []
    with pytest.raises(Killed):
        run(comm, config, at=[14], on_record=kill)
    equal(run(comm, config, go_on=True)[0], expected[0])
    (back,), steps = records(config).of(Back), records(config).of(Step)
    assert back.left_out == [14] and [step.step for step in steps].count(14) == 1


def test_a_rate_that_is_asked_for_at_a_record_counts_from_the_next_step_on(comm, folder):
    """At the start, and when the run went back; a rate of the steps that come again is undone."""
    rates, parts = {1: 0.5, 13: 0.25, 12: 0.125}, []

    def ask(record):
        place = record.step + 1 if isinstance(record, Step | Back) else 1
        if isinstance(record, Start | Back) or place == 13:
            parts[0].asked.set_factor(rates[record.step if isinstance(record, Back) else place])

    config = spiked(folder)
    run(comm, config, at=[14], on_record=ask, known=parts)
    steps = records(config).of(Step)
    found = [step.lr / steps[0].lr * 0.5 for step in steps]
    assert found == pytest.approx([0.5] * 12 + [0.25] * 2 + [0.125] * 7)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(comm, folder):
    config = spiked(folder)

    def damage(record):
        if isinstance(record, Saved) and record.step == 12 and comm.rank == 0:
            next(Path(record.path).glob("rank-*")).write_bytes(b"")

    run(comm, config, at=[14], on_record=damage)
    (back,) = records(config).of(Back)
    assert back.step == 9 and "step-00000012" in back.refused[0]


@pytest.mark.parametrize("policy", ["skip", "go_on"])
def test_no_checkpoint_keeps_a_parameter_that_is_not_finite(comm, folder, policy):
    """The update of step 9, after which a checkpoint is due, spoils one."""
    config, given = spiked(folder), spoils(9, slice(1), np.inf)
    if policy == "skip":
        run(comm, config, **given)
        (back,) = records(config).of(Back)
        assert (back.step, back.spike) == (6, 9)
        return
    config = changed(in_folder(job("mlp", batch_size=144), folder), checkpoint=SPIKE["checkpoint"])
    with pytest.raises(NonFinite, match=r"a parameter is not finite after step 9 \(rank 0: "):
        run(comm, config, **given)
    assert [*numbered(checkpoints(config))] == [6, 3]


def test_a_run_goes_further_back_where_a_spike_follows_the_same_checkpoint_again(comm, folder):
    """Parameters that are finite and bad, in the checkpoint after step 12."""
    config = spiked(folder, spike_window=2, checkpoint={"every": 3, "keep": 4})
    run(comm, config, **spoils(12, ..., 1e3))
    log = records(config)
    assert [back.step for back in log.of(Back)] == [12, 9]
    assert log.of(Step)[-1].step == 20


@pytest.mark.parametrize("ends", [Step, Epoch, None])
def test_a_run_that_ends_in_a_spike_keeps_it_and_one_that_is_stopped_says_so(comm, folder, ends):
    """At the end of an epoch, where a checkpoint is due before the test."""
    keys, parts = {"spike_steps": 3, "checkpoint": {"every": 5}}, []
    config = spiked(folder, spike_factor=1.5, **keys)

    def end(record):
        if ends and isinstance(record, ends) and parts[0].steps_done == 10:
            parts[0].asked.set_end("enough")

    given = {"at": [9], "value": 30.0, "on_record": end, "known": parts}
    if ends:
        run(comm, config, **given)
    else:
        with pytest.raises(Stopped, match=r"step 10 of 20 .*, within a spike of the loss, whose"):
            run(comm, config, **given, stop=10)
    assert next(iter(numbered(checkpoints(config)))) == (10 if ends else 5)


def test_a_run_goes_back_so_many_times_at_most(comm, folder):
    config = spiked(folder, on_spike="repeat", spike_times=2)
    with pytest.raises(NonFinite, match="went back 2 times before"):
        run(comm, config, at=[8], value=0.0)
    assert len(records(config).of(Back)) == 2


def test_going_back_needs_checkpoints(folder):
    with pytest.raises((ConfigError, ValueError), match=r"checkpoint\.every = 0"):
        spiked(folder, checkpoint={"every": 0})
