"""Views into the flat arrays, and the buckets."""

import numpy as np
import pytest

from mpitrain.arena import Arena, Bucket

INITIAL = [
    {"weight": np.arange(6.0).reshape(2, 3), "bias": np.array([6.0, 7.0])},
    {},
    {"weight": np.array([8.0])},
    {"weight": np.arange(9.0, 13.0).reshape(2, 2)},
    {},
]


@pytest.fixture
def arena():
    return Arena(INITIAL)


def test_flat_parameters_are_the_layers_in_order(arena):
    np.testing.assert_array_equal(arena.parameters, np.arange(13.0))
    for views, layer in zip(arena.parameter_views, INITIAL, strict=True):
        assert views.keys() == layer.keys()
        for name, tensor in layer.items():
            np.testing.assert_array_equal(views[name], tensor)


def test_views_alias_the_flat_arrays(arena):
    arena.parameters += 100
    assert arena.parameter_views[2]["weight"][0] == 108
    arena.parameter_views[0]["bias"][1] = -1
    assert arena.parameters[7] == -1
    assert INITIAL[0]["bias"][1] == 7


def test_store_writes_gradients_in_place(arena):
    assert not arena.gradients.any()
    arena.store(3, {"weight": np.full((2, 2), 5.0)})
    arena.store(4, {})
    np.testing.assert_array_equal(arena.gradients, [0] * 9 + [5] * 4)


def test_store_refuses_missing_gradients(arena):
    with pytest.raises(KeyError, match="bias"):
        arena.store(0, {"weight": np.zeros((2, 3))})


@pytest.mark.parametrize(
    ("minimum_bytes", "expected"),
    [
        (1, [Bucket(9, 13, 3), Bucket(8, 9, 2), Bucket(0, 8, 0)]),
        (32, [Bucket(9, 13, 3), Bucket(0, 9, 0)]),
        (40, [Bucket(8, 13, 2), Bucket(0, 8, 0)]),
        (1000, [Bucket(0, 13, 0)]),
    ],
)
def test_buckets_follow_the_backward_pass(arena, minimum_bytes, expected):
    assert arena.buckets(minimum_bytes) == expected


def test_buckets_hold_every_gradient_when_lower_layers_have_none():
    arena = Arena([{}, {"weight": np.zeros(3)}, {}, {"weight": np.zeros(2)}])
    assert arena.buckets(1) == [Bucket(3, 5, 3), Bucket(0, 3, 1)]


def test_without_parameters_there_is_nothing_to_train():
    with pytest.raises(ValueError, match="without parameters"):
        Arena([{}, {}])
