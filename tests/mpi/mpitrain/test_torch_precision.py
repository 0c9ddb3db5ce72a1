"""Torch modules in 16 bits: run.compute, and torch.autocast in the module's own forward pass."""

import pytest

from mpitrain.config import ConfigError
from tests.mpi.mpitrain.fits import RANKS, assert_alike, layouts, made, net

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
pytest.importorskip("ml_dtypes")
torch.set_num_threads(1)
pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]


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


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def squares(y, t):
    assert y.dtype == torch.float32 == t.dtype
    return (y - t).square().mean()


GIVEN = {"optimizer": sgd, "loss": squares, "metrics": {"squares": squares}, "dtype": "float32"}


def torchs_own(trainer, module, by_hand=None):
    optimizer = sgd(list(module.parameters()))
    losses = []
    for epoch in range(2):
        for batch in trainer.parts.sampler.batches(epoch):
            some = trainer.parts.data.train.in_epoch(epoch)[batch]
            x, y = torch.from_numpy(some.inputs), torch.from_numpy(some.labels)
            optimizer.zero_grad()
            if by_hand:
                losses.append(by_hand(module, x, y))
            else:
                losses.append(squares(module(x).float(), y))
                losses[-1].backward()
            optimizer.step()
    return module, losses


@pytest.mark.parametrize("parallel", layouts())
def test_autocast_in_the_module_is_torchs(folder, parallel):
    with made(folder, model=automatic, parallel=parallel, **GIVEN) as trainer:
        tests = trainer.fit()
    torch.manual_seed(7)
    module, _ = torchs_own(trainer, automatic())
    for found, wanted in zip(trainer.module.parameters(), module.parameters(), strict=True):
        assert found.dtype == torch.float32
        # bfloat16 rounds a rank's share of a gradient where it rounds the whole one.
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.01)
    if RANKS == 1:
        assert_alike(trainer.module, module)
    assert tests[-1].metrics["squares"] == pytest.approx(tests[-1].test_loss, rel=1e-5)


def test_compute_is_the_whole_module_in_16_bits(folder):
    """With the loss in float32, and parameters that keep their digits."""

    def narrow(module, x, y):
        small = {n: p.detach().bfloat16().requires_grad_() for n, p in module.named_parameters()}
        loss = squares(torch.func.functional_call(module, small, x.bfloat16()).float(), y)
        loss.backward()
        for name, parameter in module.named_parameters():
            parameter.grad = small[name].grad.float()
        return loss

    with made(folder, model=net, compute="bfloat16", **GIVEN) as trainer:
        trainer.fit()
    torch.manual_seed(7)
    module, _ = torchs_own(trainer, net(), narrow)
    for found, wanted in zip(trainer.module.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.01)
    if RANKS == 1:
        assert_alike(trainer.module, module)


def test_autocast_around_the_trainer_is_refused(comm, folder):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast is on"):
        made(folder, **GIVEN)
    trainer = made(folder, **GIVEN, parallel={"pipe": RANKS} if 1 < RANKS < 5 else {})
    on = torch.autocast("cpu", torch.bfloat16, enabled=comm.rank == comm.size - 1)
    with on, pytest.raises(ConfigError, match="autocast is on around the trainer"):
        trainer.fit()
