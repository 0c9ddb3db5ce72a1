"""Which losses are a spike, and which batches are left out then; nothing trains here."""

import pytest

from mpitrain.checkpoint.manifest import CheckpointError
from mpitrain.config import Run
from mpitrain.metrics.records import Resumed, Step
from mpitrain.training.spikes import Spike, Spikes
from mpitrain.update.agreement import Diverged, NonFinite


def spike(losses, **keys):
    """The spike in losses by their steps, and what compares them; None: there is none."""
    spikes = Spikes(Run(on_spike="skip", spike_window=2, **keys))
    for step, loss in losses.items():
        try:
            spikes.see(Step(step, 0, 8, loss, 1.0, 0.1, 1.0, 8.0, 0.0))
        except Spike as error:
            return error, spikes
    return None, spikes


@pytest.mark.parametrize(
    ("before", "steps", "refused"),
    [(-1, [3], []), (2, [3, 2, 3], ["an older one"])],
    ids=["once", "again, and what is older is damaged"],
)
def test_a_spike_around_a_step_that_was_skipped_begins_at_its_first_loss(before, steps, refused):
    error, spikes = spike({1: 1.0, 2: 1.0, 3: 9.0, 5: 9.0}, spike_steps=2)
    asked, spikes.back = [], before

    def restore(step):
        asked.append(step)
        if step == 2:
            raise CheckpointError("an older one")
        return Resumed(2, "", ["a damaged one"])

    back = spikes.go_back(error, restore, CheckpointError)
    assert asked == steps and back.left_out == [3, 4, 5]
    assert back.refused == [*refused, "a damaged one"]


@pytest.mark.parametrize(("usual", "high"), [(0.0, 1e-9), (-2.0, 1.9)])
def test_no_loss_is_so_many_times_nothing(usual, high):
    assert spike({1: usual, 2: usual, 3: high})[0] is None


def test_a_spike_is_told_from_losses_that_are_no_numbers():
    losses = {1: 100.0, 2: 1.0, 3: 1.0, 4: 90.0, 5: 80.0}
    error, spikes = spike(losses, spike_factor=2.0, spike_steps=2)
    assert "the loss at step 5 is 80, and the median" in str(error)
    assert isinstance(error, Diverged) and not isinstance(error, NonFinite)
    assert (spikes.streak, [*spikes.losses]) == ([4, 5], [1.0, 1.0])
