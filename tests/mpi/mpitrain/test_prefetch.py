"""ZeRO-3 gathers the next layer's parameters during the pass through a layer."""

import weakref

import numpy as np
import pytest

from mpitrain.parallel.zero import ShardedParameters
from tests.mpi.mpitrain.layouts import RANKS, changed, curve, equal, job

pytestmark = pytest.mark.at_most(5)

TIED = {"zero": 3, "pipe": 2} if RANKS % 2 == 0 else {"zero": 3}


@pytest.mark.parametrize(
    ("model", "keys", "compute"),
    [("mlp", {"zero": 3}, "same"), ("mlp", {"zero": 3}, "float16"), ("gpt", TIED, "same")],
)
def test_the_bits_are_the_same_with_and_without_prefetching(comm, model, keys, compute):
    dtype = "float32" if compute == "float16" else "float64"
    config = changed(job(model, dtype, **keys), compute=compute)
    expected, weights = curve(comm, changed(config, prefetch=False), steps=4)
    found, others = curve(comm, config, steps=4)
    np.testing.assert_array_equal(found, expected)
    equal(others, weights)


@pytest.mark.parametrize("compute", ["same", "float16"])
@pytest.mark.parametrize(("prefetch", "most"), [(False, 1), (True, 2)])
def test_two_layers_are_whole_at_most(comm, monkeypatch, prefetch, most, compute):
    alive, seen, gather = [], [], ShardedParameters._gather

    def gathered(self, bucket, number, **named):
        flat, plan = gather(self, bucket, number, **named)
        alive.append(number)
        weakref.finalize(flat, alive.pop)
        seen.append(len(alive))
        return flat, plan

    monkeypatch.setattr(ShardedParameters, "_gather", gathered)
    config = job("mlp", "float32", zero=3, prefetch=prefetch)
    curve(comm, changed(config, compute=compute, hidden=(24, 24, 24, 24, 24)), steps=2)
    assert max(seen) == most
