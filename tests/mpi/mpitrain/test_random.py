"""Random numbers where they stand in torch modules: one process's in every layout."""

import pytest

from mpitrain.config import ConfigError
from tests.mpi.mpitrain.fits import RANKS, Waves, assert_interrupted_alike, made

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]
nn, functional = torch.nn, torch.nn.functional


class Calls(nn.Module):
    """Computes ``f(parts, x)`` of samples of 3 x 8 numbers."""

    def __init__(self, f, *parts):
        super().__init__()
        self.f, self.parts = f, nn.ModuleList(parts)

    def forward(self, x):
        return self.f(self, x)


def attend(module, x):
    return module.parts[0](x, x, x)[0]


def in_turn(f):
    """Samples along the second axis, as sequence-first code has them."""
    return lambda module, x: f(module, x.transpose(0, 1)).transpose(0, 1)


def skipped(module, x):
    """LayerDrop (Fan et al. 2020): one number for all samples decides."""
    return x if module.training and torch.rand([]) < 0.5 else module.parts[0](x)


def deep(module, x):
    """Stochastic depth (Huang et al. 2016): a number for each sample."""
    if not module.training:
        return x + module.parts[0](x)
    kept = x.new_empty(len(x), 1, 1).bernoulli_(0.8).div_(0.8)
    return x + kept * module.parts[0](x)


def encoder(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, **options)


KINDS = {
    "attention": lambda: Calls(attend, nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)),
    "attention in turn": lambda: Calls(in_turn(attend), nn.MultiheadAttention(8, 2, dropout=0.2)),
    "encoder": lambda: encoder(batch_first=True),
    "encoder in turn": lambda: Calls(in_turn(lambda m, x: m.parts[0](x)), encoder()),
    "lstm": lambda: Calls(
        lambda m, x: m.parts[0](x)[0], nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)
    ),
    "function": lambda: Calls(lambda m, x: functional.dropout(x, 0.3, m.training)),
    "alpha": lambda: nn.AlphaDropout(0.2),
    "channels": lambda: nn.FeatureAlphaDropout(0.2),
    "depth": lambda: Calls(deep, nn.Linear(8, 8)),
    "noise": lambda: Calls(lambda m, x: x + 0.1 * torch.randn_like(x)),
    "layer drop": lambda: Calls(skipped, nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2))),
    "dot product": lambda: Calls(
        lambda m, x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.2)
    ),
    "checkpoint": lambda: Calls(
        lambda m, x: torch.utils.checkpoint.checkpoint(m.parts[0], x, use_reentrant=False),
        encoder(batch_first=True),
    ),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
}


def around(*kinds):
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 24), nn.Unflatten(1, (3, 8))),
        *(KINDS[kind]() for kind in kinds),
        nn.Sequential(nn.Flatten(), nn.Linear(24, 1)),
    )


SLOW = pytest.mark.slow


class Blocks(nn.Module):
    """No Sequential, so that it is one part or, with cuts, several."""

    def __init__(self, *, again):
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(6, 24), nn.Unflatten(1, (3, 8)))
        self.blocks = nn.ModuleList(encoder(batch_first=True) for _ in range(3))
        self.drop, self.leave = nn.Dropout(0.1), nn.Linear(24, 1)
        self.again = again

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = self.drop(block(x)) if self.again else block(x)
        return self.leave(self.drop(x).flatten(1))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("again", [pytest.param(False, marks=SLOW), True])
def test_cuts_change_no_mask(comm, folder, alone, again):
    """Also of a module on both sides of a cut."""
    if RANKS > 4:
        pytest.skip("a model of 4 parts")
    cuts = [f"blocks.{number}" for number in range(RANKS - 1)]
    changed = {"train_data": Waves(50, 1), "batch_size": 12, "epochs": 1}
    changed["model"] = lambda: Blocks(again=again)
    with made(folder, **changed, cuts=cuts, parallel={"pipe": RANKS}) as trainer:
        (found,) = trainer.fit()
    (wanted,), _ = alone(**changed)
    assert found.test_loss == pytest.approx(wanted.test_loss, rel=1e-10)


def local(**changed):
    return {"model": lambda: around("encoder", "function"), "run": {"random": "local"}} | changed


def test_local_numbers_go_on_where_they_stopped(comm, folder):
    assert_interrupted_alike(folder, local(checkpoint={"every": 3}), {})


def test_local_numbers_are_any_operators(comm, folder):
    """And other ones in each step, on each rank."""
    seen = []

    def counts(module, x):
        if module.training:
            seen.append(torch.poisson(torch.full_like(x, 50.0)))
        return x

    model = lambda: nn.Sequential(nn.Linear(6, 4), Calls(counts), nn.Linear(4, 1))  # noqa: E731
    with pytest.raises(
        ConfigError, match=r"by torch\.ops\.aten\.poisson; do without, or set run\.ra"
    ):
        made(folder, model=model).fit()
    seen.clear()
    with made(folder, **local(model=model, steps=3)) as trainer:
        trainer.fit()
    assert len(seen) > 3 and seen[-1].shape == seen[-2].shape
    assert not torch.equal(seen[-1], seen[-2])
    every = comm.allgather(seen[-1].flatten()[:4].tolist())
    assert len(set(map(tuple, every))) == comm.size
