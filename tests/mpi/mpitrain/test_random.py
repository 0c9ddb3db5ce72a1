"""Random numbers where they stand in torch modules: one process's in every layout."""

from copy import deepcopy

import pytest

from mpitrain.config import ConfigError
from tests.mpi.mpitrain.fits import assert_interrupted_alike, made, torch
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
    assert len(set(map(tuple, comm.allgather(seen[-1].flatten()[:4].tolist())))) == comm.size
