"""``mpitrain.Trainer`` with optimisers and schedules of torch: the numbers of its own loop."""

import pytest

from mpitrain.config import Config, Optim
from tests.cases import slow_case
from tests.mpi.mpitrain.fits import OPTIMIZERS, PARALLEL, assert_alike, made, sgd, torch, torchs_own

pytestmark = pytest.mark.at_most(5)


def test_groups_of_a_job(comm, folder):
    """The job's own optimiser with groups is torch's with the same."""
    groups = [
        {"names": ["part0.weight"], "lr": 0.5, "weight_decay": 0.2},
        {"names": ["*.bias"], "weight_decay": 0.0},
    ]
    optim = {"name": "adamw", "lr": 3e-3, "reference_batch": 0, "weight_decay": 0.1}
    optim |= {"schedule": "cosine", "groups": groups}

    def same(parameters):
        first, *rest = parameters
        weights, biases = ([p for p in rest if (p.ndim > 1) == is_weight] for is_weight in (1, 0))
        groups = [
            {"params": weights, "weight_decay": 0.1},
            {"params": biases, "weight_decay": 0.0},
            {"params": [first], "weight_decay": 0.2, "lr": 1.5e-3},
        ]
        return torch.optim.AdamW(groups, lr=3e-3)

    with made(folder, optim=optim, parallel=PARALLEL) as trainer:
        trainer.fit()
    assert_alike(trainer.module, torchs_own(trainer, same)[0])


@pytest.mark.quick_on(2)
@pytest.mark.parametrize("zero", [slow_case(0), 3])
def test_the_module_has_the_averages_that_were_tested(comm, folder, zero):
    changed = {"optimizer": OPTIMIZERS["AdamW"], "average": 0.8, "parallel": {"zero": zero}}
    with made(folder, **changed) as trainer:
        tests = trainer.fit()
        x, y = (torch.from_numpy(a) for a in vars(trainer.parts.data.test[:]).values())
    loss = torch.nn.functional.mse_loss(trainer.module.double()(x), y)
    assert loss.item() == pytest.approx(tests[-1].test_loss, rel=1e-6)
    with made(folder, **(changed | {"average": 0.0})) as trainer:
        assert trainer.fit()[-1].test_loss != pytest.approx(tests[-1].test_loss, rel=1e-3)


def test_a_schedule_of_ones_own_is_torchs(comm, folder):
    """Rank 0's function counts, so that no rank has another rate; interrupted, it goes on."""
    schedule = lambda step: 1 / (1 + step + (comm.rank if PARALLEL else 0))  # noqa: E731
    changed = {"schedule": schedule, "optim": {"name": "sgd", "lr": 0.05, "reference_batch": 0}}
    with made(folder, **changed, parallel=PARALLEL, steps=7) as trainer:
        trainer.fit()
    with made(folder, **changed, parallel=PARALLEL) as trainer:
        trainer.fit(resume=True)
    later = lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))  # noqa: E731
    assert_alike(trainer.module, torchs_own(trainer, sgd, later)[0])


@pytest.mark.parametrize(
    "asked",
    [
        {"lr": 0.5},
        {"config": Config(optim=Optim(lr=0.5))},
        {"optim": {"lr": 0.125}, "reference_batch": 6},
    ],
)
def test_a_rate_beside_an_optimizer_of_torch_is_the_rate(comm, folder, asked):
    with made(folder, optimizer=OPTIMIZERS["SGD"], **asked) as trainer:
        assert trainer.parts.rates.rate(0) == trainer.parts.rates.common(0) == 0.5
