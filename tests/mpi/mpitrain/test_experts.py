"""Experts on several ranks against all experts in one process: numbers, bytes, checkpoints."""

import numpy as np
import pytest
from msgspec.structs import replace

from mpitrain import nn
from mpitrain.config import ConfigError, Loss, Optim, Parallel, Sync
from mpitrain.group import TensorGroup
from mpitrain.start import start
from tests.gpu.jobs import trained
from tests.mpi.mpitrain.layouts import RANKS, alone, curve, equal, job
from tests.mpi.mpitrain.test_layouts import same

#: More rows than experts take, experts that groups cannot share evenly, both losses.
MIXTURE = dict(layers=2, experts=5, top=2, capacity=1.0, balance=0.1, router_z=0.01)


def mixture(model=MIXTURE, dtype="float64", batch_size=24, micro_batches=4, **parallel):
    config = job("gpt", dtype, batch_size, micro_batches)
    model = replace(config.model, **model)
    return replace(config, model=model, parallel=Parallel(bucket_bytes=2048, **parallel))


@pytest.mark.parametrize("experts", [1, 2])
def test_fewer_experts_than_ranks(comm, experts):
    model = MIXTURE | dict(experts=experts, top=1, capacity=0.0)
    config = mixture(model, experts=RANKS if RANKS % (2 * experts) else 2 * experts)
    same(curve(comm, config, 2), alone(config, 2), 1e-10)


def test_one_expert_trains_as_the_dense_block_bit_for_bit(comm):
    """But for the norm, which adds up squares in the order of memory, where the router is, too."""
    one = MIXTURE | dict(experts=1, top=1, balance=0.0, router_z=0.0)
    optim = Optim(name="adamw", lr=1e-3, reference_batch=0)
    jobs = (replace(mixture(how), optim=optim) for how in (one, MIXTURE | dict(experts=0)))
    (found, parameters), (expected, right) = (curve(comm, config, 4) for config in jobs)
    np.testing.assert_array_equal(found[:, 0], expected[:, 0])
    named = {name.replace("experts.0.", ""): values for name, values in parameters.items()}
    equal({name: values for name, values in named.items() if "router" not in name}, right)


IGNORED = Loss(ignore_index=1)  # spaces, the second of the characters in order


def test_routers_losses_are_means_over_samples_whatever_labels_count(comm):
    plain = mixture(MIXTURE | dict(balance=0.0, router_z=0.0))
    jobs = [
        replace(one, optim=Optim(lr=0.3, reference_batch=0, momentum=0.0), loss=loss)
        for one in (mixture(), plain) for loss in (Loss(), IGNORED)
    ]  # fmt: skip
    every, some, every_plain, some_plain = (alone(one, 1)[1] for one in jobs)
    name = next(name for name in every if "router" in name)
    moved = every[name] - every_plain[name]
    np.testing.assert_allclose(some[name] - some_plain[name], moved, rtol=1e-9, atol=1e-15)
    assert not np.allclose(some[name], every[name], rtol=1e-6, atol=0)
    config = replace(mixture(experts=RANKS), loss=IGNORED)
    same(curve(comm, config, 3), alone(config, 3), 1e-10)


def test_workers_of_their_own_count_labels_beside_what_layers_add(comm):
    """Late agreement on losses changes none of them."""
    jobs = (replace(mixture(), loss=IGNORED, sync=Sync("local", 2, agree=n)) for n in (1, 2))
    same(*(curve(comm, config, 4) for config in jobs), 1e-12)


@pytest.mark.parametrize("top", [1, 2])
def test_bytes_are_those_of_the_rows_that_leave(comm, top):
    """4 K T D (1 - 1/p) numbers of a sample, forward and backward, where choices are even."""
    width, positions, samples, experts = 6, RANKS * 4, 3, 2 * RANKS
    layers = [nn.Linear(width, width, bias=False) for _ in range(experts)]
    routing, group = nn.Routing(top=top, capacity=0.0), TensorGroup(comm)
    layer = nn.Experts(width, layers, routing, group, algorithm="pairwise")
    parameters = layer.parameters(np.random.default_rng(0), np, np.float64)
    # Positions choose the experts in turn, and the next ones for K = 2.
    x = np.ones((samples, positions, width))
    turn = np.arange(positions) % experts
    scores = 3.0 * np.eye(experts)[turn] + 2.0 * np.eye(experts)[(turn + 1) % experts]
    layer.layers["router"] = Given(scores)
    traffic = comm.traffic or comm.count_traffic()
    before = traffic.sent + traffic.shared
    _, saved = layer.forward(parameters, x)
    layer.backward(parameters, saved, x)
    total = comm.allreduce(traffic.sent + traffic.shared - before)
    rows = 8 * 4 * top * positions * samples * width * (RANKS - 1)  # of all ranks together
    counts = 8 * experts * RANKS * (RANKS - 1)
    assert rows <= total <= rows + 2 * counts, (total, rows, counts)


class Given(nn.Layer):
    """Scores that do not follow from x."""

    def __init__(self, scores):
        self.scores = scores

    def output_shape(self, shape):
        return *shape[:-1], self.scores.shape[-1]

    def forward(self, parameters, x):
        return np.broadcast_to(self.scores, (len(x), *self.scores.shape)), x.shape

    def backward(self, parameters, saved, dy):
        return np.zeros(saved), None


@pytest.mark.quick_on(2)
def test_on_a_device(cupy):
    config = mixture(dtype="float32", experts=RANKS)
    right, found = (trained(device, config, 2) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(found[0], right[0], rtol=1e-5)


@pytest.mark.mpi(min_size=2)
def test_groups_that_do_not_divide_the_replicas(comm):
    with pytest.raises(ConfigError, match=rf"{RANKS} replicas cannot be cut into groups of"):
        start(comm, mixture(experts=RANKS + 1))
