"""Data, model, loss and metrics of one's own, in every layout, against one process."""

from itertools import pairwise

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain import nn
from mpitrain.config import Config, ConfigError
from mpitrain.data import DataError, Dataset, Samples
from mpitrain.objective.elementwise import MeanSquaredError
from mpitrain.objective.metrics import AllSamples
from mpitrain.start import start
from mpitrain.training.evaluation import evaluate
from mpitrain.training.parts import UserObjects
from tests.mpi.mpitrain.layouts import RANKS, changed, few, layouts


def samples(count, seed):
    x = np.random.default_rng(seed).uniform(-2, 2, (count, 6))
    return Samples(x, np.stack([np.sin(x[:, 0]) * x[:, 1], x[:, 2] * x[:, 3]], axis=1))


WAVES = Dataset(samples(101, 0), samples(37, 1), classes=0)


def layers(outputs=2):
    widths = [6, 16, 16, 16, outputs]
    found = {}
    for index, (a, b) in enumerate(pairwise(widths)):
        found[f"linear{index}"] = nn.Linear(a, b)
        if b != outputs:
            found[f"gelu{index}"] = nn.GELU()
    return found


def job(**parallel):
    return changed(
        Config(), dtype="float64", loss={"name": "mean_squared_error"},
        evaluate={"metrics": ["mae", "rmse"]}, parallel=parallel,
        optim={"name": "adamw", "lr": 0.01, "reference_batch": 0},
        train={"epochs": 1, "batch_size": 24, "micro_batches": 2},
    )  # fmt: skip


def trained(comm, config, **own):
    """Losses of the steps, the test, and what layers keep on all ranks."""
    own = {"data": WAVES, "layers": layers(), **own}
    with start(comm, config, UserObjects(**own)) as trainer:
        losses = [record.loss for record in trainer.run_epoch(0)]
        tested, every = evaluate(trainer.parts, 0), comm.allgather(trainer.parts.state)
        return losses, tested, {name: v for state in every for name, v in state.items()}


def regular():
    """Layers that see where they are, and what they keep."""
    found = layers()
    return {
        "linear0": found["linear0"],
        "norm": nn.BatchNorm(16),
        "gelu0": found["gelu0"],
        "drop": nn.Dropout(0.3),
        "inner": nn.Residual({"norm": nn.BatchNorm(16), "drop": nn.Dropout(0.1)}),
        "linear3": found["linear3"],
    }


#: Layouts that six layers can have which are no gpt's.
LAYOUTS = {
    name: parallel
    for name, parallel in layouts("gpt", RANKS).items()
    if not parallel.keys() & {"context", "tensor", "sequence", "partition"}
    and parallel.get("pipe", 1) * parallel.get("chunks", 1) <= 6
}


@pytest.mark.parametrize("layout", [one for one in few("gpt", RANKS) if one.values[0] in LAYOUTS])
def test_dropout_and_batch_norm_are_those_of_one_process(comm, layout):
    config = job(**LAYOUTS[layout])
    if len(set(config.parallel.replicas)) > 1:
        with pytest.raises(ConfigError, match=r"parallel\.replicas: batch norm needs"):
            start(comm, config, objects=UserObjects(data=WAVES, layers=regular()))
        return
    losses, tested, state = trained(comm, config, layers=regular())
    expected, test, alone = trained(MPI.COMM_SELF, job(), layers=regular())
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    assert tested.test_loss == pytest.approx(test.test_loss, rel=1e-9)
    assert tested.metrics == pytest.approx(test.metrics, rel=1e-9)
    assert state.keys() == alone.keys() and len(state) == 4
    for name, values in state.items():
        # The gradient of a bias before a batch norm is 0 up to rounding, which Adam makes larger.
        np.testing.assert_allclose(values, alone[name], rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("kind", ["uint8", "int64", "bool"])
def test_integers_that_name_no_rows_are_numbers(comm, kind):
    """Whatever layer takes them, a run, its trial and its test are those of floating point."""

    def results(dtype):
        data = [Samples((s.inputs > 0).astype(dtype), s.labels) for s in (WAVES.train, WAVES.test)]
        own = {"drop": nn.Dropout(0.4), "norm": nn.BatchNorm(6), **layers()}
        objects = UserObjects(data=Dataset(*data, classes=0), layers=own)
        with start(comm, job(), objects) as trainer:
            losses = [record.loss for record in trainer.run_epoch(0)]
            return losses, evaluate(trainer.parts, 0), trainer.parts.passes.through()

    for found, right in zip(results(kind), results("float64"), strict=True):
        np.testing.assert_equal(found, right)


class Quartic(MeanSquaredError):
    """``(output - label)**4``."""

    def compare(self, given, wanted):
        d = given - wanted
        return d**4, 4 * d**3


def test_a_loss_and_a_metric_of_ones_own(comm):
    def worst(outputs, labels):
        return np.abs(outputs - labels).max(axis=1).mean()

    own = {"loss": Quartic(), "metrics": {"worst": AllSamples(worst)}}
    losses, tested, _ = trained(comm, job(), **own)
    expected, test, _ = trained(MPI.COMM_SELF, job(), **own)
    np.testing.assert_allclose(losses, expected, rtol=1e-11)
    assert tested.metrics == pytest.approx(test.metrics, rel=1e-11)


def talk(comm, first=0, kind=Samples, metric=None, **parallel):
    """A metric of a language model of 5 tokens, whose last test sample begins with ``first``."""
    tokens = np.random.default_rng(0).integers(0, 5, (2, 44, 8))
    tokens[0, 3, 0] = first
    train, test = (kind(*tokens[:, part]) for part in (slice(4, None), slice(4)))
    config = changed(
        Config(), dtype="float64", data={"name": "text", "path": "here", "context": 8},
        model={"kind": "gpt", "layers": 1, "heads": 2, "width": 8},
        train={"epochs": 1, "batch_size": 24}, parallel=parallel,
    )  # fmt: skip
    objects = UserObjects(data=Dataset(train, test, 5), metrics={"own": AllSamples(metric)})
    with start(comm, config, objects) as trainer:
        return evaluate(trainer.parts, 0).metrics["own"]


@pytest.mark.skipif(RANKS % 2 == 1, reason="two ranks share samples")
@pytest.mark.parametrize("shared", ["context", "tensor"])
def test_a_metric_of_all_samples_sees_whole_ones(comm, shared):
    def weighted(outputs, labels):
        both = np.concatenate([outputs.ravel(), labels.ravel()])
        return (both * np.cos(np.arange(both.size))).sum()

    found = talk(comm, metric=weighted, **{shared: 2})
    assert found == pytest.approx(talk(MPI.COMM_SELF, metric=weighted), rel=1e-9)


class Read:
    """Samples that a program reads when they are asked for."""

    def __init__(self, inputs, labels):
        self.samples = Samples(inputs, labels)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, which):
        return self.samples[which]


@pytest.mark.parametrize(("first", "kind"), [(-7, Samples), (5, Samples), (5, Read)])
def test_inputs_beyond_the_table_are_refused(comm, first, kind):
    """Tests read samples 0 to 3, the last of which begins with another token."""
    with pytest.raises(DataError, match=rf"sample 3 to test on holds the input {first}, .* 0 to 4"):
        talk(comm, first, kind)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({}, rf"have different jobs: layers is \['linear0'.* and \[\] on rank {RANKS - 1};"),
        (layers(outputs=3), f"^(model|loss): .* .rank {RANKS - 1} of {RANKS}, on "),
    ],
    ids=["none", "another"],
)
def test_a_model_that_one_rank_alone_is_refused_ends_all(comm, own, told):
    own = own if comm.rank == RANKS - 1 else layers()
    with pytest.raises(ConfigError, match=told):
        start(comm, job(), objects=UserObjects(data=WAVES, layers=own))
