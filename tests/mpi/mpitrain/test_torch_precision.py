"""Torch modules in 16 bits: run.compute, and torch.autocast in the module's own forward pass."""

import pytest

from mpitrain.config import ConfigError
from tests.cases import slow_case
from tests.mpi.mpitrain.fits import PARALLEL, RANKS, assert_alike, made, net, sgd, torch, torchs_own

pytest.importorskip("ml_dtypes")
pytestmark = pytest.mark.at_most(5)


class Automatic(torch.nn.Module):
    """Matrix products in bfloat16, the rest in float32."""

    def __init__(self, width, out):
        super().__init__()
        self.lin, self.norm = torch.nn.Linear(width, 16), torch.nn.LayerNorm(16)
        self.out = torch.nn.Linear(16, out)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.out(torch.tanh(self.norm(self.lin(x))))


def automatic():
    return torch.nn.Sequential(*(Automatic(w, o) for w, o in ((6, 8), (8, 8), (8, 8), (8, 1))))


def squares(y, t):
    assert y.dtype == torch.float32 == t.dtype
    return (y - t).square().mean()


GIVEN = {"optimizer": sgd, "loss": squares, "metrics": {"squares": squares}, "dtype": "float32"}


def expect_torchs_own(trainer, make):
    """The module is that of torch's own loop, but for rounding.

    bfloat16 rounds a rank's share of a gradient where it rounds the whole one.
    """
    loss = lambda y, t: squares(y.float(), t)  # noqa: E731
    wanted, _ = torchs_own(trainer, sgd, None, make=make, loss=loss, dtype=torch.float32)
    for found, value in zip(trainer.module.parameters(), wanted.parameters(), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, value, rtol=0.02, atol=0.01)
    if RANKS == 1:
        assert_alike(trainer.module, wanted)


def test_autocast_in_the_module_is_torchs(folder):
    with made(folder, model=automatic, parallel=PARALLEL, **GIVEN) as trainer:
        tests = trainer.fit()
    expect_torchs_own(trainer, automatic)
    assert tests[-1].metrics["squares"] == pytest.approx(tests[-1].test_loss, rel=1e-5)


class Narrow(torch.nn.Module):
    """A module in 16 bits, whose parameters keep their digits."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        small = {name: p.bfloat16() for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, small, x.bfloat16()).float()


def test_compute_is_the_whole_module_in_16_bits(folder):
    """With the loss in float32."""
    with made(folder, model=net, compute="bfloat16", **GIVEN) as trainer:
        trainer.fit()
    expect_torchs_own(trainer, Narrow)


def test_autocast_around_the_trainer_is_refused(comm, folder):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast is on"):
        made(folder, **GIVEN).fit()
    trainer = made(folder, **GIVEN, parallel={"pipe": RANKS} if 1 < RANKS < 5 else {})
    on = torch.autocast("cpu", torch.bfloat16, enabled=comm.rank == comm.size - 1)
    with on, pytest.raises(ConfigError, match="autocast is on around the trainer"):
        trainer.fit()


class Mixed(torch.nn.Module):
    """A wide or a narrow part in the middle, and a frozen one."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 16), torch.nn.Linear(16, 1)
        self.inner, self.frozen = (torch.nn.Linear(16, 16).to(kind) for _ in range(2))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        assert x.dtype == self.first.weight.dtype == torch.float32
        x = torch.tanh(self.first(x))
        for part in (self.inner, self.frozen):
            x = torch.tanh(part(x.to(part.weight.dtype)))
        assert self.inner.weight.dtype == x.dtype != torch.float32
        return self.last(x.float())


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [(torch.bfloat16, {"zero": 3, "recompute": True}), (torch.float64, {})]
    + [slow_case(kind, {}) for kind in (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_each_parameter_computes_in_its_own_type(folder, kind, parallel):
    """As in torch, with the parameters kept and updated in the widest type."""
    given = {"optimizer": sgd, "test_data": None, "metrics": None, "dtype": None}
    with made(folder, model=lambda: Mixed(kind), parallel=parallel, **given) as trainer:
        wide = torch.float64 if kind is torch.float64 else torch.float32
        assert trainer.config.run.dtype == str(wide).removeprefix("torch.")
        found = [record.loss for epoch in range(2) for record in trainer.run_epoch(epoch)]
        torch.manual_seed(7)
        module, losses = Mixed(kind), []
        kept = {n: p.detach().to(wide).requires_grad_() for n, p in module.named_parameters()}
        optimizer = sgd([p for n, p in kept.items() if not n.startswith("frozen")])
        for epoch in range(2):
            for batch in trainer.parts.sampler.batches(epoch):
                some = trainer.parts.data.train.in_epoch(epoch)[batch]
                optimizer.zero_grad()
                own = {n: kept[n].to(p.dtype) for n, p in module.named_parameters()}
                y = torch.func.functional_call(module, own, torch.from_numpy(some.inputs).float())
                loss = torch.nn.functional.mse_loss(y.to(wide), torch.from_numpy(some.labels))
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
    digits = {torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float64: 1e-6}[kind]
    torch.testing.assert_close(found, losses, rtol=digits, atol=0)
