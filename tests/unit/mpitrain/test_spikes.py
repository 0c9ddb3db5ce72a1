"""Which losses are a spike, and which batches are left out then; nothing trains here."""

import pytest

from mpitrain.config import Run
from mpitrain.metrics.records import Resumed, Step
from mpitrain.step.agreement import NonFinite
from mpitrain.training.spikes import Spikes


def spike(losses, **keys):
    """The spike in losses by their steps, and what compares them; None: there is none."""
    spikes = Spikes(Run(on_spike="skip", spike_window=2, **keys))
    for step, loss in losses.items():
        try:
            spikes.see(Step(step, 0, 8, loss, 1.0, 0.1, 1.0, 8.0, 0.0))
        except NonFinite as error:
            return error, spikes
    return None, spikes


def test_a_spike_around_a_step_that_was_skipped_begins_at_its_first_loss():
    error, spikes = spike({1: 1.0, 2: 1.0, 3: 9.0, 5: 9.0}, spike_steps=2)
    asked = []

    def restore(before):
        asked.append(before)
        return Resumed(2, "", ["a damaged one"])

    back = spikes.go_back(error, restore)
    assert asked == [3] and back.left_out == [3, 4, 5]
    assert back.refused == ["a damaged one"]


@pytest.mark.parametrize(("usual", "high"), [(0.0, 1e-9), (-2.0, 1.9)])
def test_no_loss_is_so_many_times_nothing(usual, high):
    assert spike({1: usual, 2: usual, 3: high})[0] is None
