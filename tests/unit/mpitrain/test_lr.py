"""Values of the learning rate, worked out by hand or by torch."""

import pytest

from mpitrain.config import Optim, Train
from mpitrain.optim.lr import Rates
from mpitrain.optim.schedule_table import tabulated

TRAIN = Train(epochs=10, batch_size=256)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {0: 0.4, 9.5: 0.4}),  # linear scaling
        ({"warmup_epochs": 4}, {0: 0.1, 1: 0.175, 2: 0.25, 3: 0.325, 4: 0.4, 9: 0.4}),
        ({"warmup_epochs": 2, "schedule": "cosine"}, {1: 0.25, 2: 0.4, 6: 0.2, 10: 0.0}),
        (
            {"schedule": "step", "milestones": (3, 6), "decay": 0.5},
            {0: 0.4, 2.99: 0.4, 3: 0.2, 5.5: 0.2, 6: 0.1, 9: 0.1},
        ),
        (
            {"warmup_epochs": 2, "schedule": "wsd", "decay_epochs": 4},
            {0: 0.1, 1: 0.25, 2: 0.4, 6: 0.4, 7: 0.3, 9: 0.1, 10: 0.0},
        ),
    ],
    ids=str,
)
def test_rates_by_epoch(fields, expected):
    """Warm-up climbs from the reference rate to the scaled one; schedules fall from there."""
    optim = Optim(lr=0.1, reference_batch=64, **fields)
    found = [Rates(optim, TRAIN, 3).rate(3 * epoch) for epoch in expected]
    assert found == pytest.approx(list(expected.values()), abs=1e-15)


def test_warm_up_never_exceeds_the_scaled_rate_of_a_small_batch():
    optim = Optim(lr=0.1, reference_batch=64, warmup_epochs=4)
    small = Train(epochs=10, batch_size=32)
    assert [Rates(optim, small, 1).rate(e) for e in (0, 2, 5)] == pytest.approx([0.05] * 3)


@pytest.mark.parametrize(("epochs", "warmup", "per_epoch"), [(10, 3, 7), (4, 0.5, 5), (3, 2.9, 10)])
def test_one_cycle_is_torchs(epochs, warmup, per_epoch):
    torch = pytest.importorskip("torch")
    total = epochs * per_epoch
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.4, total_steps=total, pct_start=warmup / epochs, cycle_momentum=False
    )
    optim = Optim(lr=0.1, reference_batch=64, warmup_epochs=warmup, schedule="one_cycle")
    train = Train(epochs=epochs, batch_size=256)
    for step in range(total):
        expected = optimizer.param_groups[0]["lr"]
        assert Rates(optim, train, per_epoch).rate(step) == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        if step + 1 < total:
            cycle.step()


def test_one_cycle_of_a_single_step_of_climbing():
    optim = Optim(lr=1.0, reference_batch=0, warmup_epochs=1, schedule="one_cycle")
    found = [Rates(optim, Train(epochs=3), 1).rate(step) for step in range(3)]
    assert found == pytest.approx([1.0, 0.5, 0.0], abs=1e-5)


def test_factors_of_a_function_are_tabulated():
    assert tabulated(lambda step: 0.5**step, 3).tolist() == [1.0, 0.5, 0.25]
