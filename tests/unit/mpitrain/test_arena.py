"""Where tensors lie, and the buckets."""

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.parallel.arena import DATA, Arena, Bucket


def arena(layers, **more):
    return Arena(layers, {name: layer.shapes() for name, layer in layers.items()}, **more)


@pytest.mark.parametrize(
    "wrong", [{"weight": np.zeros((1, 2))}, {"weight": np.zeros((3, 2)), "more": np.zeros(1)}]
)
def test_parameters_of_other_shapes_than_were_said_are_refused(wrong):
    made = arena({"a": nn.Linear(3, 2, bias=False)})
    with pytest.raises(ValueError, match=r"parameters\(\) gives the shapes .* shapes\(\) says"):
        made.fill(np.empty(made.size), 0, wrong)


@pytest.mark.parametrize(
    ("minimum_bytes", "expected"),
    [
        (1, [(9, 13, {3}), (8, 9, {2}), (0, 8, {0})]),
        (32, [(9, 13, {3}), (0, 9, {0, 2})]),
        (40, [(8, 13, {2, 3}), (0, 8, {0})]),
        (1000, [(0, 13, {0, 2, 3})]),
    ],
)
def test_buckets_follow_the_backward_pass(minimum_bytes, expected):
    few = {"b": nn.Linear(1, 1, bias=False), "c": nn.Linear(2, 2, bias=False)}
    layers = {"a": nn.Linear(3, 2), "relu": nn.ReLU(), **few, "end": nn.ReLU()}
    buckets = [Bucket(start, stop, frozenset(of), DATA) for start, stop, of in expected]
    assert arena(layers).buckets(minimum_bytes, 8) == buckets


def test_stages_begin_the_sums_that_they_share_last_and_in_one_order():
    shared = {f"{name}.{of}": f"stages {name}" for name in "ab" for of in ("weight", "bias")}

    def order(*names):
        layers = {name: nn.Linear(2, 2) for name in names}
        return [bucket.group for bucket in arena(layers, shared=shared).buckets(1, 8)]

    assert order("a", "b", "first") == order("b", "last", "a") == [DATA, "stages a", "stages b"]
