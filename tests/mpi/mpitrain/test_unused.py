"""Parameters that the loss does not follow from stay as torch leaves them."""

from dataclasses import replace

import pytest
from mpi4py import MPI

from mpitrain.config import ConfigError
from tests.mpi.mpitrain.fits import RANKS, assert_interrupted_alike, layouts
from tests.mpi.mpitrain.unused_twins import Case, Turns, check

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
torch.set_num_threads(1)
pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]

#: Some is never called, some gives what the loss leaves out, and some is used for the special
#: samples alone, which are in the second, fourth and sixth batch.
CASE = Case(
    trees=(("always", ()), ("aside", (("always", ()),)), ("never", ()), (0, ())),
    whole=False, special=((30, 31, 80, 120),), samples=144, batch_size=24, micro_batches=1,
    own=False,
)  # fmt: skip
#: Without values that decide, so that it can be cut: what is aside crosses the cuts.
CUT = replace(
    CASE, trees=CASE.trees[:3], whole=True, settings={"cuts": ["parts.0", "parts.1", "parts.2"]}
)


def in_settings(case, **settings):
    return replace(case, settings=case.settings | settings)


def test_what_is_used_now_and_then_is_torchs(comm, folder):
    """Used on one rank is used; the others' counts of steps go on without it."""
    check(in_settings(CASE, parallel={"zero": 1}), comm, folder)


@pytest.mark.parametrize("parallel", layouts())
def test_what_crosses_a_cut_and_is_not_used(comm, folder, parallel):
    case = in_settings(CUT, parallel=parallel | {"checksums": RANKS == 3})
    check(case, comm, folder)


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"parallel": {"zero": 2}}, marks=pytest.mark.slow),
        {"sync": {"kind": "local", "period": 2, "agree": 3}},
    ],
    ids=["data", "zero 2", "workers"],
)
def test_an_interrupted_run_counts_on(folder, how):
    """Each worker by itself, if they are told late."""
    test = {"test_data": Turns(30, 2, CASE.special), "epochs": 2}
    changed = in_settings(CASE, checkpoint={"every": 3}, **how).given()
    assert_interrupted_alike(folder, changed | test, {})


def test_batches_of_fewer_samples_than_ranks(comm, folder):
    """An empty share uses nothing."""
    check(replace(CASE, samples=6, batch_size=2), comm, folder)


@pytest.mark.skipif(RANKS not in (2, 4), reason="a pipeline of two")
def test_asynchronous_pipelines_refuse_it(folder):
    parallel = {"pipe": 2, "schedule": "asynchronous"}
    trainer = in_settings(replace(CUT, own=True), parallel=parallel).trainer(folder)
    with pytest.raises(ConfigError, match=r"does not follow from part0\.parts\.0"):
        trainer.fit()


class Pair(torch.nn.Module):
    """The first of two."""

    def forward(self, pair):
        return pair[0]


def of_all(outputs, labels):
    return (outputs.mean(1, keepdim=True) - labels).square().mean()


@pytest.mark.skipif(RANKS < 2, reason="a worker and a server")
def test_servers_refuse_it(folder):
    """And take torch modules whose parameters are all used."""
    case = in_settings(replace(CASE, own=True), server={"ranks": 1})
    trainer = case.trainer(folder)
    with pytest.raises(ConfigError, match=r"part\d.* has no part in the loss"):
        trainer.fit()
    model = {"model": lambda: torch.nn.Sequential(Pair(), torch.nn.Linear(6, 8)), "loss": of_all}
    test = {"test_data": Turns(30, 2, CASE.special), "dir": str(folder / "other")}
    with case.trainer(folder, **model, **test) as trainer:
        assert len(trainer.fit()) == 1


class TwoNorms(torch.nn.Module):
    """Batch norm before two outputs, and another one before the second alone."""

    def __init__(self):
        super().__init__()
        linear, norm = torch.nn.Linear, torch.nn.BatchNorm1d
        self.first = torch.nn.Sequential(linear(6, 8), norm(8), torch.nn.Tanh())
        self.second = torch.nn.Sequential(linear(8, 8), norm(8), torch.nn.Tanh(), linear(8, 1))
        self.head = linear(8, 1)

    def forward(self, x, special):
        x = self.first(x)
        return {"y": self.head(x), "more": self.second(x), "special": special}


def of_both(outputs, labels):
    """The second output counts where samples are special."""
    at = outputs["special"][:, 0] > 0
    total = ((outputs["y"] - labels) ** 2).sum()
    return total + (outputs["more"][at] ** 2).sum() if at.any() else total, len(labels)


def test_ranks_go_backward_together_through_norms_that_one_of_them_uses(comm, folder):
    """As one process: also in batches in which no rank uses them."""
    case, found = replace(CASE, samples=48, batch_size=6, special=((0, 13, 15),)), []
    for own in MPI.COMM_SELF, comm:
        given = {"model": lambda: TwoNorms().double(), "loss": of_both}
        place = folder / f"{own.size} {comm.rank if own is MPI.COMM_SELF else 0}"
        with case.trainer(place, own, **given) as trainer:
            trainer.fit()
            found.append(trainer.module.state_dict())
    for name, values in found[0].items():
        torch.testing.assert_close(found[1][name], values, rtol=1e-6, atol=1e-8, msg=name)
