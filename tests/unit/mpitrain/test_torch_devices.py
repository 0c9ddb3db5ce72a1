"""Losses and optimisers of torch keep their constants on the outputs' device, here ``meta``."""

import pytest
import torch

from mpitrain.adapters.torch.arrays import moved
from mpitrain.adapters.torch.functions.objective import Following
from mpitrain.adapters.torch.functions.optimizer import TorchOptimizer


class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.ones(3))

    def forward(self, outputs, labels):
        return (self.weights * (outputs - labels) ** 2).mean()


@pytest.mark.parametrize(
    "function", [Weighted(), torch.nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))]
)
@pytest.mark.parametrize("several", [False, True])
def test_a_loss_finds_what_it_keeps_where_the_outputs_are(function, several):
    here = Following(function if not several else Second(function))
    for device in ("cpu", "meta", "cpu"):
        outputs, labels = torch.ones(2, 3, device=device), torch.zeros(2, 3, device=device)
        assert here((outputs, outputs) if several else outputs, labels).device.type == device
    assert all(tensor.device.type == "cpu" for tensor in function.buffers())


class Second(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, outputs, labels):
        return self.loss(outputs[1], labels)


def test_what_a_loss_keeps_goes_there_again_when_it_has_changed():
    loss = Weighted()
    here = Following(loss)
    outputs = torch.ones(2, 3, device="meta")
    found = []
    for _ in range(3):
        here(outputs, outputs)
        found.append(here._moved["weights"][1])
        if len(found) == 2:
            loss.weights.mul_(2.0)
    assert found[0] is found[1] and found[1] is not found[2]


def test_a_constant_in_the_place_of_another_goes_there():
    """PyTorch gives the memory of the last one to the next."""
    before, found = {}, []
    for _ in range(5):
        constant = torch.ones(1000)
        found.append(moved(before, "weights", constant, torch.device("meta")))
        del constant
    assert len(set(map(id, found))) == 5


@pytest.mark.parametrize("fused", [None, True])
def test_steps_are_counted_where_the_optimiser_reads_them(fused):
    torchs = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=fused)
    (group,) = torchs.param_groups
    made = TorchOptimizer(torchs, {k: v for k, v in group.items() if k != "params"})
    taken = made._count(4, torch.ones(2, dtype=torch.float64, device="meta"))
    assert taken.device.type == ("meta" if fused else "cpu") and taken.dtype == torch.float32
