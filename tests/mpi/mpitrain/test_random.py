"""Random numbers where they stand in torch modules: one process's in every layout."""

from copy import deepcopy

import pytest

from mpitrain.config import ConfigError
from tests.mpi.mpitrain.fits import RANKS, Waves, assert_interrupted_alike, made, torch
from tests.unit.mpitrain.test_torch_draws import KINDS as of_unit_tests
from tests.unit.mpitrain.test_torch_draws import Calls, checkpointed, encoders

pytestmark = pytest.mark.at_most(5)
nn = torch.nn
KINDS = {
    **{
        kind: of_unit_tests[kind]
        for kind in (
            "attention", "attention in turn", "encoder", "lstm", "lstm in turn", "alpha",
            "channels", "depth", "normal", "layer drop", "dot product", "in turn in one axis",
        )
    },
    "checkpoint": Calls(checkpointed(), *encoders()),
    "spectral norm": nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
}  # fmt: skip


def around(*kinds):
    """The parts on samples of 5 x 8 numbers."""
    parts = [deepcopy(KINDS[kind]) for kind in kinds]
    for name, parameter in nn.ModuleList(parts).named_parameters():
        # The gradient of a key's bias is rounding, which Rprop would make large.
        parameter.requires_grad_(not name.endswith("in_proj_bias"))
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 40), nn.Unflatten(1, (5, 8))),
        *parts,
        nn.Sequential(nn.Flatten(), nn.Linear(40, 1)),
    ).double()


class Blocks(nn.Module):
    """No Sequential, so that it is one part or, with cuts, several; it drops on both sides."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(6, 24), nn.Unflatten(1, (3, 8)))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)
        )
        self.drop, self.leave = nn.Dropout(0.1), nn.Linear(24, 1)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = self.drop(block(x))
        return self.leave(self.drop(x).flatten(1))


@pytest.mark.mpi(min_size=2)
@pytest.mark.at_most(4)
def test_cuts_change_no_mask(folder, alone):
    cuts = [f"blocks.{number}" for number in range(RANKS - 1)]
    changed = {"train_data": Waves(50, 1), "batch_size": 12, "epochs": 1, "model": Blocks}
    with made(folder, **changed, cuts=cuts, parallel={"pipe": RANKS}) as trainer:
        (found,) = trainer.fit()
    (wanted,), _ = alone(**changed)
    assert found.test_loss == pytest.approx(wanted.test_loss, rel=1e-10)


LOCAL = {"model": lambda: around("encoder", "depth"), "run": {"random": "local"}}


def test_local_numbers_go_on_where_they_stopped(folder):
    assert_interrupted_alike(folder, LOCAL | {"checkpoint": {"every": 3}}, {})


def test_local_numbers_are_any_operators(comm, folder):
    """And other ones in each step, on each rank."""
    seen = []

    def counts(x):
        seen.append(torch.poisson(torch.full_like(x, 50.0)))
        return x

    model = lambda: nn.Sequential(nn.Linear(6, 4), Calls(counts), nn.Linear(4, 1))  # noqa: E731
    told = r"by torch\.ops\.aten\.poisson; do without, or set run\.ra"
    with pytest.raises(ConfigError, match=told):
        made(folder, model=model).fit()
    seen.clear()
    given = LOCAL | {"model": model, "steps": 3, "test_data": None, "metrics": None}
    with made(folder, **given) as trainer:
        trainer.fit()
    assert len(seen) > 3 and seen[-1].shape == seen[-2].shape
    assert not torch.equal(seen[-1], seen[-2])
    every = comm.allgather(seen[-1].flatten()[:4].tolist())
    assert len(set(map(tuple, every))) == comm.size
