"""Values of the learning rate, worked out by hand or by torch."""

from math import cos, pi

import pytest
from mpi4py import MPI

from mpitrain.config import ConfigError, Optim, Train
from mpitrain.optim.lr import Rates


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {0: 0.4, 9.5: 0.4}),  # linear scaling
        ({"reference_batch": 512, "warmup_epochs": 4}, {0: 0, 2: 0.025, 5: 0.05}),  # scaled down
        ({"warmup_epochs": 4}, {0: 0.1, 1: 0.175, 2: 0.25, 3: 0.325, 4: 0.4, 9: 0.4}),
        ({"warmup_epochs": 2, "schedule": "cosine"}, {1: 0.25, 2: 0.4, 6: 0.2, 10: 0.0}),
        ({"schedule": "step", "milestones": (3, 6), "decay": 0.5},
         {0: 0.4, 2.99: 0.4, 3: 0.2, 5.5: 0.2, 6: 0.1, 9: 0.1}),
        ({"warmup_epochs": 2, "schedule": "wsd", "decay_epochs": 4},
         {0: 0.1, 1: 0.25, 2: 0.4, 6: 0.4, 7: 0.3, 9: 0.1, 10: 0.0}),
        ({"warmup_epochs": 8, "schedule": "wsd", "decay_epochs": 4},  # the fall does not fit
         {0: 0.1, 4: 0.25, 8: 0.4, 9: 0.2, 10: 0.0}),
        ({"warmup_epochs": 1 / 3, "schedule": "one_cycle"},  # a single step of climbing
         {0: 0.4, 29 / 3: 1.6e-6}),
    ],
    ids=str,
)  # fmt: skip
def test_rates_by_epoch(fields, expected):
    """Warm-up climbs from the reference rate or 0 to the scaled one; schedules fall from there."""
    optim = Optim(**{"lr": 0.1, "reference_batch": 64} | fields)
    rates = Rates(optim, Train(epochs=10, batch_size=256), 3)
    found = [rates.rate(3 * epoch) for epoch in expected]
    assert found == pytest.approx(list(expected.values()), abs=1e-15)


def one_rate(make, steps):
    """The rates that a scheduler of torch gives to so many steps, of 0.4."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = make(torch.optim.lr_scheduler, optimizer)
    for step in range(1, 1 + steps):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        if step < steps:
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
    """Epochs begin at other steps in a run that goes on with other batches."""
    optim = Optim(lr=1.0, reference_batch=0, warmup_steps=10, schedule="linear")
    rates = Rates(optim, Train(epochs=4), 10, ahead=4)
    assert [rates.rate(s) for s in (5, 10, 27, 44)] == pytest.approx([0.5, 1.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("optim", "train", "message"),
    [
        ({"warmup_steps": 21}, {}, "warmup_steps: 21 steps of .* do not fit into the run's 21"),
        ({"warmup_steps": 5}, {"steps": 5}, "do not fit into the run's 5 steps; take fewer"),
        ({"warmup_steps": 7, "schedule": "wsd", "decay_epochs": 2}, {}, "of climbing and 14 of f"),
    ],
)
def test_a_warm_up_that_does_not_fit_into_the_run(optim, train, message):
    with pytest.raises(ConfigError, match=message):
        Rates(Optim(**optim), Train(**{"epochs": 3} | train), 7).tabulate(MPI.COMM_SELF, None)


@pytest.mark.parametrize(("epochs", "warmup", "per_epoch"), [(10, 3, 7), (4, 0.5, 5), (3, 2.9, 10)])
def test_one_cycle_is_torchs(epochs, warmup, per_epoch):
    total = epochs * per_epoch
    cycle = {"max_lr": 0.4, "total_steps": total, "pct_start": warmup / epochs}
    optim = Optim(lr=0.1, reference_batch=64, warmup_epochs=warmup, schedule="one_cycle")
    rates = Rates(optim, Train(epochs=epochs, batch_size=256), per_epoch)
    theirs = one_rate(lambda by, own: by.OneCycleLR(own, cycle_momentum=False, **cycle), total)
    assert [rates.rate(step) for step in range(total)] == pytest.approx([*theirs], rel=1e-12)
