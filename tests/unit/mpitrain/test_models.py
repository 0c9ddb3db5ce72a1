"""Models built from their tables, and the data that they are for."""

import numpy as np
import pytest

from mpitrain import data, models
from mpitrain.config import ConfigError, Data, Model


@pytest.mark.parametrize("kind", ["mlp", "convnet"])
@pytest.mark.parametrize("hidden", [(), (7,), (9, 5)])
def test_scores_for_each_class(kind, hidden):
    model = models.build(Model(kind=kind, hidden=hidden, channels=(3, 4)), (8, 8, 1), classes=10)
    parameters = model.parameters(np.random.default_rng(0), np, np.float32)
    scores, _ = model.forward(parameters, np.ones((2, 8, 8, 1), np.float32))
    assert scores.shape == (2, 10)
    assert scores.dtype == np.float32
    assert sum(layer["weight"].ndim == 2 for layer in parameters if layer) == len(hidden) + 1
    assert (scores < 0).any() and (scores > 0).any()  # no ReLU after the last layer


def test_too_many_blocks_for_the_image():
    with pytest.raises(ConfigError, match=r"model\.channels: 4 blocks are too many .*\(8, 8, 1\)"):
        models.build(Model(kind="convnet", channels=(2, 2, 2, 2)), (8, 8, 1), classes=10)


def test_digits_are_split_without_overlap_and_in_proportion():
    digits = data.load(Data("digits", 0.2), np.float32)
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.input_shape == (8, 8, 1)
    assert digits.train.inputs.dtype == np.float32
    assert (digits.train.inputs.min(), digits.train.inputs.max()) == (0, 1)
    shares = [np.bincount(part.labels) / len(part) for part in (digits.train, digits.test)]
    np.testing.assert_allclose(*shares, atol=0.005)
    train, test = ({x.tobytes() for x in part.inputs} for part in (digits.train, digits.test))
    assert not train & test


def test_digits_are_the_same_every_time():
    one, two = (data.load(Data("digits", 0.3), np.float64) for _ in range(2))
    np.testing.assert_array_equal(one.train.inputs, two.train.inputs)
    np.testing.assert_array_equal(one.test.labels, two.test.labels)
