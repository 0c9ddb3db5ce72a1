"""Images whose rows lie on several ranks, against one rank that has them whole."""

from copy import deepcopy
from itertools import islice, product

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from mpitrain import nn
from mpitrain.config import Config, ConfigError
from mpitrain.data.dataset import Dataset, Samples
from mpitrain.group import TensorGroup, share
from mpitrain.metrics.records import Step
from mpitrain.models import SequentialModel
from mpitrain.models.convnets import vgg
from mpitrain.nn.context import Context
from mpitrain.nn.rows import Rows, in_rows
from mpitrain.objective import CrossEntropy
from mpitrain.search.layers import layer_costs
from mpitrain.start import start
from mpitrain.training.evaluation import evaluate
from mpitrain.training.parts import UserObjects
from tests.cases import slow_case
from tests.mpi.mpitrain.layouts import RANKS, changed, close, whole


def passes(layers, parameters, x, dy, context):
    """The output, the gradient by x and those by the parameters."""
    chain = nn.Chain(layers)
    y, saved = chain.forward(parameters, x, context)
    dx, kept = chain.backward(parameters, saved, dy)
    return y, dx, chain.gradients(parameters, kept)


def expect_those_of_one_rank(comm, layers, shape, samples=2, tolerance=1e-11):
    """Outputs and gradients of layers on rows are those on whole images."""
    rng, chain = np.random.default_rng(5), nn.Chain(layers)
    x = rng.normal(size=(samples, *shape))
    dy = rng.normal(size=(samples, *chain.output_shape(shape)))
    parameters = chain.parameters(np.random.default_rng(6), np, np.float64)
    parameters = {name: v + 0.1 * rng.normal(size=v.shape) for name, v in parameters.items()}
    numbers = np.arange(samples)
    group = TensorGroup(comm)

    one, many = (
        Context(training=True, samples=numbers, replicas=who, state=chain.state(np.float64))
        for who in (TensorGroup(), group)
    )
    y, dx, gradients = passes(layers, parameters, x, dy, one)
    rows = share(shape[0], comm.rank, comm.size)
    found = passes(in_rows(layers, shape, group), parameters, x[:, rows], dy / comm.size, many)
    np.testing.assert_allclose(found[0], y, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found[1], dx[:, rows], rtol=tolerance, atol=tolerance)
    close({k: comm.allreduce(v) for k, v in found[2].items()}, gradients, rtol=tolerance,
          atol=tolerance)  # fmt: skip
    close(many.state, one.state, rtol=tolerance, atol=tolerance)


#: Kernels odd and even, with and without zeros around, and with more of them than the kernel needs.
WINDOWS = [
    (size, stride, padding)
    for size, stride in product((1, 2, 3, 4, 5, 7), (1, 2))
    for padding in sorted({0, size // 2})
]
WINDOWS += [(3, 3, 1), (2, 3, 0), (3, 1, 4)]
SLOW_HEIGHTS = [slow_case(height) for height in (8, 11)]


@pytest.mark.parametrize("height", [7, *SLOW_HEIGHTS])
def test_windows_are_those_of_one_rank(comm, height):
    """Also with fewer rows than ranks, and windows over the rows of several ranks."""
    for number, (size, stride, padding) in enumerate(WINDOWS):
        pool = (nn.AveragePool2d, nn.MaxPool2d)[number % 2]
        layers = {
            "first": nn.Conv2d(2, 3, size, stride=stride, padding=padding),
            "second": nn.Conv2d(3, 2, 1 + number % 2, padding=1),
            "pool": pool(2, stride=1 + number % 3),
            "end": nn.GlobalAveragePool() if number % 4 < 2 else nn.Flatten(),
        }
        expect_those_of_one_rank(comm, layers, (height, 7, 2))


@pytest.mark.parametrize("samples", [0, 2, 3])
def test_norms_dropout_and_residuals_are_those_of_one_rank(comm, samples):
    """Batch norm on rows and behind them, with its running moments."""
    body = {
        "norm": nn.GroupNorm(2, 4), "relu": nn.ReLU(), "drop": nn.Dropout(0.4),
        "convolution": nn.Conv2d(4, 6, 3, stride=2, padding=1), "batch": nn.BatchNorm(6),
    }  # fmt: skip
    layers = {
        "stem": nn.Chain({"convolution": nn.Conv2d(1, 4, 3, padding=1), "norm": nn.LayerNorm(4)}),
        "block": nn.Residual(body, {"convolution": nn.Conv2d(4, 6, 1, stride=2)}),
        "again": nn.Recomputed(nn.Residual({"linear": nn.Linear(6, 6), "gelu": nn.GELU()})),
        "head": nn.Chain({"flat": nn.Flatten(), "drop": nn.Dropout(0.2), "norm": nn.BatchNorm(30)}),
    }
    before = deepcopy(vars(layers["head"].layers["norm"]))
    expect_those_of_one_rank(comm, layers, (9, 1, 1), samples)
    assert vars(layers["head"].layers["norm"]) == before
    # Outputs for each point are whole on each rank.
    layers = {"a": nn.Conv2d(1, 2, 3, padding=1), "b": nn.Conv2d(2, 5, 1)}
    expect_those_of_one_rank(comm, layers, (6, 5, 1), samples)


@pytest.mark.skipif(RANKS == 1, reason="nothing is sent")
def test_halos_alone_are_sent(comm):
    """A 3x3 filter needs one row of each neighbour, and 2x2 windows at steps of 2 none."""
    with Communicator(comm) as own:
        group, height, traffic = TensorGroup(own), 4 * RANKS, own.count_traffic()
        x = np.ones((2, 4, 5, 3))
        line = 2 * 5 * 3 * x.itemsize
        neighbours = (comm.rank > 0) + (comm.rank < RANKS - 1)
        needed = {(3, 1, 1): neighbours, (5, 1, 2): 2 * neighbours, (2, 2, 0): 0, (1, 1, 0): 0}
        for (size, stride, padding), lines in needed.items():
            outputs = (height + 2 * padding - size) // stride + 1
            fetch = Rows(group, height).windows(outputs, size, stride, padding)
            messages, sent = traffic.messages, traffic.sent + traffic.shared
            fetch.give(fetch.take(x))
            assert traffic.sent + traffic.shared - sent == 2 * lines * line
            assert traffic.messages - messages == 2 * neighbours * (lines > 0)


@pytest.mark.skipif(RANKS == 1, reason="nothing is sent")
def test_the_plan_knows_the_bytes(comm):
    shape, samples, alone = (4 * RANKS, 4, 1), 3, TensorGroup()
    layers = vgg(shape, (2, 3), (8,), 5, 2, alone)
    costs = layer_costs(SequentialModel(layers, CrossEntropy(alone, 5), alone), shape)
    with Communicator(comm) as own:
        traffic = own.count_traffic()
        chain = nn.Chain(in_rows(layers, shape, TensorGroup(own)))
        parameters = chain.parameters(np.random.default_rng(0), np, np.float64)
        y, saved = chain.forward(parameters, np.ones((samples, 4, 4, 1)))
        chain.backward(parameters, saved, y)
        sent = comm.allreduce(traffic.sent + traffic.shared)
    planned = 2 * (RANKS - 1) * sum(one.told for one in costs) * samples * y.itemsize
    assert traffic.native == 0 and sent == planned


def batch_norm_on_images(height):
    rng = np.random.default_rng(7)
    labels = rng.integers(4, size=48)
    images = rng.normal(size=(48, height, 6, 1)) + labels[:, None, None, None] / 4
    test = Samples(images[:16], labels[:16])
    layers = {
        "a": nn.Conv2d(1, 4, 5, padding=2), "norm": nn.BatchNorm(4), "relu": nn.ReLU(),
        "drop": nn.Dropout(0.1), "pool": nn.AveragePool2d(2), "flat": nn.Flatten(),
        "out": nn.Linear(height // 2 * 12, 4),
    }  # fmt: skip
    return UserObjects(layers=layers, data=Dataset(Samples(images, labels), test, 4))


def job(**keys):
    return changed(Config(), model={"kind": "convnet"}, **keys)


def test_batch_norm_and_tests_of_own_layers(comm):
    """Its running moments decide what a test finds."""
    keys, found = {"seed": 2, "dtype": "float64", "optim": {"lr": 0.1}, "epochs": 2}, []
    for ranks in (comm, MPI.COMM_SELF):
        config = job(space=ranks.size, batch_size=8, **keys)
        with Communicator(ranks) as own, start(own, config, batch_norm_on_images(13)) as trainer:
            records = [r for r in islice(trainer.run_epoch(0), 6) if isinstance(r, Step)]
            tested = evaluate(trainer.parts, 0)
            found.append((
                [r.loss for r in records], tested.test_loss, tested.metrics["accuracy"],
                trainer.parts.passes.state, whole(ranks, trainer),
            ))  # fmt: skip
    many, one = found
    np.testing.assert_allclose(many[0], one[0], rtol=1e-10)
    assert many[1] == pytest.approx(one[1], rel=1e-10) and many[2] == one[2]
    close(many[3], one[3], rtol=1e-10, atol=1e-12)
    close(many[4], one[4], rtol=0, atol=1e-10)


@pytest.mark.parametrize("space", [1, RANKS])
def test_a_batch_norm_of_one_sample_is_refused_on_all_ranks(comm, space):
    """Replicas have no sample besides, and ranks that share an image count it several times."""
    layers = {"pool": nn.GlobalAveragePool(), "norm": nn.BatchNorm(1), "out": nn.Linear(1, 4)}
    own = UserObjects(data=batch_norm_on_images(8).data, layers=layers)
    with (
        pytest.raises(ConfigError, match="step 1: batch norm norm has a single value a channel"),
        start(comm, job(space=space, batch_size=1), own) as trainer,
    ):
        next(trainer.run_epoch(0))
