"""Errors of runs that diverge: a spike of the loss is told from losses that are no numbers."""

from dataclasses import dataclass

import pytest

from mpitrain.config.tables import Run
from mpitrain.training.spikes import Spike, Spikes
from mpitrain.update.agreement import Diverged, NonFinite


@dataclass
class Loss:
    step: int
    loss: float


def test_a_large_loss_is_a_spike_and_is_not_called_infinite():
    spikes = Spikes(Run(on_spike="skip", spike_window=2, spike_factor=2.0, spike_steps=2))
    for number, loss in enumerate([100.0, 1.0, 1.0, 90.0], 1):
        spikes.see(Loss(number, loss))
    assert (spikes.streak, [*spikes.losses]) == (1, [1.0, 1.0])
    with pytest.raises(Spike, match="the loss at step 5 is 80, and the median") as raised:
        spikes.see(Loss(5, 80.0))
    assert isinstance(raised.value, Diverged) and not isinstance(raised.value, NonFinite)
