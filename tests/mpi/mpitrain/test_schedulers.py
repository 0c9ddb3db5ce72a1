"""Schedulers of torch: some that drawn programs have, and what is refused."""

import pytest

from mpitrain.config import ConfigError
from tests.mpi.mpitrain.fits import made

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
lr_scheduler = pytest.importorskip("torch.optim.lr_scheduler")
torch.set_num_threads(1)
pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]
STEPS = 10  # of the job of ``made``


def adamw(parameters):
    """Two groups with rates, decays and betas of their own."""
    wide = [p for p in parameters if p.ndim > 1]
    flat = [p for p in parameters if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": wide}, {"params": flat, "lr": 1e-3, "weight_decay": 0.0, "betas": (0.8, 0.9)}],
        lr=3e-3,
        weight_decay=0.1,
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def sequential(optimizer):
    up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    down = lr_scheduler.CosineAnnealingLR(optimizer, 7)
    return lr_scheduler.SequentialLR(optimizer, [up, down], milestones=[3])


CASES = {
    "LambdaLR": (
        adamw,
        lambda o: lr_scheduler.LambdaLR(o, [lambda s: s / 10, lambda s: 0.9**s]),  # from 0
    ),
    "StepLR": (adamw, lambda o: lr_scheduler.StepLR(o, 3, 0.5)),
    "CosineAnnealingLR": (adamw, lambda o: lr_scheduler.CosineAnnealingLR(o, 7, 1e-4)),
    "OneCycleLR": (adamw, lambda o: lr_scheduler.OneCycleLR(o, [6e-3, 2e-3], total_steps=STEPS)),
    "momentum": (sgd, lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=STEPS)),
    "CyclicLR": (sgd, lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.05, step_size_up=2)),
    "SequentialLR": (adamw, sequential),
    "plateau": (adamw, lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.3, patience=0)),
    "warm restarts": (adamw, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2)),
}


class ByNorm(lr_scheduler.LRScheduler):
    """Reads a parameter, of which only training knows the values."""

    def get_lr(self):
        first = self.optimizer.param_groups[0]["params"][0]
        return [rate / float(first.norm()) for rate in self.base_lrs]


REFUSED = [
    (adamw, ByNorm, "^schedule: called with the optimiser, it fails: .*parameters have no values"),
    (adamw, lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5), "has no value for step 6"),
    (adamw, lambda o: lr_scheduler.StepLR(sgd([torch.nn.Parameter(torch.ones(1))]), 2), "another"),
    (adamw, lambda o: [lr_scheduler.StepLR(o, 2)], "it gives a list"),
    (adamw, lambda o: lr_scheduler.StepLR(o, "two"), "schedule: "),
    (adamw, lambda o: lr_scheduler.LambdaLR(o, lambda s: 5 - s), "group 0 is -0.003 at step 6"),
    ("adam", lambda o: lr_scheduler.StepLR(o, 2), "with optimizer= of torch"),
    (adamw, lr_scheduler.StepLR(sgd([torch.nn.Parameter(torch.ones(1))]), 2), "give a function"),
    (sgd([torch.nn.Parameter(torch.ones(1))]), None, "give a function that makes it"),
    (lambda p: [sgd(p[:1]), sgd(p[1:])], None, r"gives a list.*examples/pytorch/gan\.py"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_cannot_be_is_refused_on_all_ranks(folder, number):
    optimizer, schedule, why = REFUSED[number]
    with pytest.raises(ConfigError, match=why):
        made(folder, optimizer=optimizer, schedule=schedule)
