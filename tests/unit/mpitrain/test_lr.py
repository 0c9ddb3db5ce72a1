"""Values of the learning rate, worked out by hand or by torch."""

from math import cos, pi

import pytest
from mpi4py import MPI

from mpitrain.config import Config, ConfigError, Optim, Train
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
        (  # the whole fall does not fit
            {"warmup_epochs": 8, "schedule": "wsd", "decay_epochs": 4},
            {0: 0.1, 4: 0.25, 8: 0.4, 9: 0.2, 10: 0.0},
        ),
        ({"warmup_epochs": 10, "schedule": "one_cycle"}, {0: 0.016, 29 / 3: 0.4}),
    ],
    ids=str,
)
def test_rates_by_epoch(fields, expected):
    """Warm-up climbs from the reference rate to the scaled one; schedules fall from there."""
    optim = Optim(lr=0.1, reference_batch=64, **fields)
    found = [Rates(optim, TRAIN, 3).rate(3 * epoch) for epoch in expected]
    assert found == pytest.approx(list(expected.values()), abs=1e-15)


def test_warm_up_climbs_from_0_to_a_rate_that_is_not_scaled_up():
    optim = Optim(lr=0.1, reference_batch=64, warmup_epochs=4)
    small = Train(epochs=10, batch_size=32)
    assert [Rates(optim, small, 1).rate(e) for e in (0, 2, 5)] == pytest.approx([0, 0.025, 0.05])


def one_rate(make, steps):
    """The rates that a scheduler of torch gives to so many steps, of 0.4."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = make(torch.optim.lr_scheduler, optimizer)
    for _ in range(steps):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()


#: By the part of the fall that is over.
SHAPES = {"cosine": lambda part: 0.5 + cos(pi * part) / 2, "linear": lambda part: 1 - part}
SHAPES["constant"] = lambda part: 1


@pytest.mark.parametrize("ends", [0, 17, 99])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("warmup", [0, 5])
def test_schedules_by_name_are_those_of_torch_and_transformers(kind, warmup, ends):
    """They end at the run's last step, also where that comes before the end of the epochs."""
    total = ends if ends == 17 else 21
    rates = Rates(
        Optim(lr=0.4, reference_batch=0, schedule=kind, warmup_steps=warmup),
        Train(epochs=3, steps=ends), 7,
    )  # fmt: skip
    assert rates.total_steps == total
    found = [rates.rate(step) for step in range(total)]
    climbing = [step / 5 for step in range(warmup)]
    falling = [SHAPES[kind](step / (total - warmup)) for step in range(total - warmup)]
    assert found == pytest.approx([0.4 * part for part in climbing + falling], rel=1e-12)
    if kind != "constant" and not warmup:
        plain = {
            "cosine": lambda torchs, own: torchs.CosineAnnealingLR(own, total),
            "linear": lambda torchs, own: torchs.LinearLR(own, 1.0, 0.0, total),
        }
        assert found == pytest.approx(list(one_rate(plain[kind], total)), rel=1e-11)


def test_warm_up_in_steps_counts_the_steps_that_were_taken():
    """Of a run that goes on with other batches, epochs begin at other steps."""
    optim = Optim(lr=1.0, reference_batch=0, warmup_steps=10, schedule="linear")
    rates = Rates(optim, Train(epochs=4), 10, ahead=4)
    assert [rates.rate(s) for s in (5, 10, 27, 44)] == pytest.approx([0.5, 1.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("optim", "train", "message"),
    [
        ({"warmup_steps": 21}, {}, "warmup_steps: 21 steps of .* do not fit into the run's 21"),
        ({"warmup_steps": 5}, {"steps": 5}, "do not fit into the run's 5 steps; take fewer"),
        (
            {"warmup_steps": 7, "schedule": "wsd", "decay_epochs": 2},
            {},
            "7 steps of climbing and 14 of falling do not fit",
        ),
    ],
)
def test_a_warm_up_that_does_not_fit_into_the_run(optim, train, message):
    with pytest.raises(ConfigError, match=message):
        Rates(Optim(**optim), Train(**{"epochs": 3} | train), 7).tabulate(MPI.COMM_SELF, None)


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


def test_warm_up_is_in_steps_or_in_epochs():
    with pytest.raises(ValueError, match="warmup_steps: warmup_epochs = 1 says the same"):
        Config(optim=Optim(warmup_steps=5, warmup_epochs=1))


def test_factors_of_a_function_are_tabulated():
    assert tabulated(lambda step: 0.5**step, 3).tolist() == [1.0, 0.5, 0.25]
