"""ZeRO-3 gathers the next layer's parameters during the pass through a layer."""

import weakref

import pytest

from mpitrain.parallel.zero import ShardedParameters
from mpitrain.start import start
from tests.mpi.mpitrain.layouts import RANKS, changed, equal, job, to_the_end, whole

pytestmark = pytest.mark.at_most(5)

TIED = {"zero": 3, "pipe": 2} if RANKS % 2 == 0 else {"zero": 3}


def trained(comm, config):
    with start(comm, config) as trainer:
        losses = [(record.loss, record.grad_norm) for record in to_the_end(trainer)]
        return losses, whole(comm, trainer)


@pytest.mark.parametrize(
    ("model", "keys", "compute"),
    [("mlp", {"zero": 3}, "same"), ("mlp", {"zero": 3}, "float16"), ("gpt", TIED, "same")],
)
def test_the_bits_are_the_same_with_and_without_prefetching(comm, model, keys, compute):
    dtype = "float32" if compute == "float16" else "float64"
    config = changed(job(model, dtype, **keys), steps=4, compute=compute)
    expected, weights = trained(comm, changed(config, prefetch=False))
    found, others = trained(comm, config)
    assert found == expected
    equal(others, weights)


@pytest.mark.parametrize("compute", ["same", "float16"])
@pytest.mark.parametrize(("prefetch", "most"), [(False, 1), (True, 2)])
def test_two_layers_are_whole_at_most(comm, monkeypatch, prefetch, most, compute):
    alive, seen, gather = weakref.WeakSet(), [], ShardedParameters._gather

    class Flat:
        """Stands for an array, which a set cannot hold."""

    def gathered(self, bucket, number, **named):
        flat, plan = gather(self, bucket, number, **named)
        token = Flat()
        alive.add(token)
        weakref.finalize(flat, lambda token: None, token)  # dies with the array
        seen.append(len(alive))
        return flat, plan

    monkeypatch.setattr(ShardedParameters, "_gather", gathered)
    config = job("mlp", "float32", zero=3, prefetch=prefetch)
    config = changed(config, steps=2, compute=compute, hidden=(24, 24, 24, 24, 24))
    trained(comm, config)
    assert max(seen) == most
