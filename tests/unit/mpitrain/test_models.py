"""Models built from their tables, and the data that they are for."""

import tracemalloc
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain import data, models, nn
from mpitrain.config import Config, ConfigError, Data, Model, Parallel
from mpitrain.data.dataset import Dataset, Samples
from mpitrain.group import TensorGroup
from mpitrain.objective.elementwise import MeanSquaredError

IMAGES = Dataset(Samples(np.ones((2, 8, 8, 1), np.float32), np.zeros(2, int)), None, 10)
TEXT = Dataset(Samples(np.ones((2, 6), int), np.zeros((2, 6), int)), None, 11)


def scores(config, dataset, dtype=np.float32):
    model = models.build(config, dataset)
    initial = {name: model.drawn(name, 0, np, dtype) for name in model.layers}
    x = dataset.train[:2].inputs
    for name, layer in model.layers.items():
        x, _ = layer.forward(initial[name], x)
    return model, initial, x


@pytest.mark.parametrize("kind", ["mlp", "convnet", "vgg", "resnet"])
@pytest.mark.parametrize("hidden", [(), (7,), (9, 5)])
def test_scores_for_each_class(kind, hidden):
    _, _, found = scores(Config(model=Model(kind=kind, hidden=hidden, channels=(3, 4))), IMAGES)
    assert found.shape == (2, 10)
    assert found.dtype == np.float32
    assert (found < 0).any() and (found > 0).any()  # no ReLU after the last layer


def test_a_gpt_has_one_table_for_both_ends():
    own = Model(kind="gpt", width=8, heads=2, layers=3)
    model, initial, found = scores(Config(data=Data(name="text", context=6), model=own), TEXT)
    assert found.shape == (2, 6, 11)
    assert list(model.layers) == ["embedding", "block0", "block1", "block2", "head"]
    assert model.ties() == {"embedding.tokens.token": {"embedding", "head"}}
    table = initial["embedding"]["tokens.token"]
    np.testing.assert_array_equal(initial["head"]["scores.token"], table)


class Split(nn.Linear):
    def shared(self, group):
        self.split = {"weight": 0}
        return self


def test_scores_of_a_programs_own_layers_are_whole_beside_any_kind():
    config = Config(data=Data(name="text", context=6), model=Model(kind="gpt"))
    ranks = SimpleNamespace(size=2, rank=0)
    assert models.build(config, TEXT, ranks, layers={"own": Split(6, 11)}).group.size == 1


def test_shapes_cost_no_memory():
    """34 million parameters, which would be 137 MB."""
    config = Config(
        data=Data(name="text", context=256),
        model=Model(kind="gpt", width=512, heads=8, layers=8),
        parallel=Parallel(recompute=True),
    )
    model = models.build(config, Dataset(TEXT.train, None, 8192))
    tracemalloc.start()
    try:
        shapes, size = model.shapes(), model.size
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert shapes["embedding.tokens.token"] == shapes["head.scores.token"] == (8192, 512)
    assert 29e6 < size < 30e6  # the table of tokens is there once
    assert size + 8192 * 512 == sum(map(prod, shapes.values()))
    assert peak < 1e6


class Scaled(nn.ReLU):
    """A layer of somebody else's, which does not know of shapes."""

    def parameters(self, rng, xp, dtype):
        return {"scale": xp.ones((2, 3), dtype)}


def test_a_layer_that_says_no_shapes_is_drawn_to_see_them():
    model = models.SequentialModel({"a": Scaled()}, MeanSquaredError(), TensorGroup())
    assert model.shapes() == model.trained() == {"a.scale": (2, 3)}


@pytest.mark.parametrize("first", ["enc", "enc.x"])
def test_the_owner_of_a_tied_tensor_has_the_longest_name_that_fits(first):
    layers = {name: nn.Linear(2, 2) for name in dict.fromkeys([first, "enc", "enc.x", "out"])}
    layers["out"].tied = {"weight": "enc.x.weight"}
    model = models.SequentialModel(layers, MeanSquaredError(), TensorGroup())
    assert model.ties() == {"enc.x.weight": {"enc.x", "out"}}
    begin = {name: model.drawn(name, 0, np, np.float64) for name in layers}
    np.testing.assert_array_equal(begin["out"]["weight"], begin["enc.x"]["weight"])
    layers["out"].tied = {"weight": "end.weight"}
    model = models.SequentialModel(layers, MeanSquaredError(), TensorGroup())
    with pytest.raises(ConfigError, match=r"layer out has 'end\.weight' in common with a layer"):
        model.ties()


def test_digits_are_split_without_overlap_and_in_proportion():
    digits, again = (data.load(Data("digits", test_fraction=0.2), np.float32) for _ in range(2))
    assert data.digest(digits) == data.digest(again)
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.input_shape == (8, 8, 1)
    assert digits.train.inputs.dtype == np.float32
    assert (digits.train.inputs.min(), digits.train.inputs.max()) == (0, 1)
    shares = [np.bincount(part.labels) / len(part) for part in (digits.train, digits.test)]
    np.testing.assert_allclose(*shares, atol=0.005)
    train, test = ({x.tobytes() for x in part.inputs} for part in (digits.train, digits.test))
    assert not train & test


def test_clicks_are_the_same_every_time_and_can_be_learnt():
    source = Data("clicks", samples=500, tables=3, rows=20)
    one, two = (data.load(source, np.float32).train for _ in range(2))
    np.testing.assert_array_equal(one.inputs, two.inputs)
    np.testing.assert_array_equal(one.labels, two.labels)
    assert one.inputs.shape == (400, 3) and one.inputs.max() < 20
    assert 0.3 < one.labels.mean() < 0.7
