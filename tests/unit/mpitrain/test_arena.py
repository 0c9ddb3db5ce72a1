"""Where tensors lie, and the buckets."""

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.group import TensorGroup, cut
from mpitrain.parallel.arena import COPIES, DATA, SUMMED, Arena, Bucket

LAYERS = {
    "a": nn.Linear(3, 2),
    "relu": nn.ReLU(),
    "b": nn.Linear(1, 1, bias=False),
    "c": nn.Linear(2, 2, bias=False),
    "end": nn.ReLU(),
}
INITIAL = {
    "a": {"weight": np.arange(6.0).reshape(3, 2), "bias": np.array([6.0, 7.0])},
    "relu": {},
    "b": {"weight": np.array([[8.0]])},
    "c": {"weight": np.arange(9.0, 13.0).reshape(2, 2)},
    "end": {},
}


class Ranks(TensorGroup):
    """The second of two tensor ranks, without the other."""

    def __init__(self):
        super().__init__()
        self.rank, self.size = 1, 2


def shapes(initial):
    return {name: {own: v.shape for own, v in layer.items()} for name, layer in initial.items()}


@pytest.fixture
def arena():
    return Arena(LAYERS, shapes(INITIAL))


def test_parameters_of_other_shapes_than_were_said_are_refused(arena):
    first, *_ = INITIAL.values()
    name = next(iter(first))
    for wrong in (first | {name: first[name][:1]}, first | {"more": np.zeros(1)}):
        with pytest.raises(ValueError, match=r"parameters\(\) gives the shapes .* shapes\(\) says"):
            arena.fill(np.empty(arena.size), 0, wrong)


def test_tensors_inside_a_bucket_are_views_of_it(arena):
    flat = np.arange(float(arena.size))
    found = {}
    for bucket in arena.buckets(8, 8):
        found |= arena.inside(bucket, flat[bucket.start : bucket.stop])
    assert list(sorted(found)) == sorted(tensor.name for tensor in arena.tensors)
    for tensor in arena.tensors:
        values = flat[tensor.start : tensor.stop].reshape(tensor.shape)
        np.testing.assert_array_equal(found[tensor.name], values)
        assert np.shares_memory(found[tensor.name], flat)


def test_flat_parameters_are_the_layers_in_order(arena):
    flat = np.empty(arena.size)
    for index, values in enumerate(INITIAL.values()):
        arena.fill(flat, index, values)
    np.testing.assert_array_equal(flat, np.arange(13.0))
    for views, layer in zip(arena.views(flat), INITIAL.values(), strict=True):
        assert views.keys() == layer.keys()
        for name, tensor in layer.items():
            np.testing.assert_array_equal(views[name], tensor)


@pytest.mark.parametrize(
    ("minimum_bytes", "expected"),
    [
        (1, [(9, 13, {3}), (8, 9, {2}), (0, 8, {0})]),
        (32, [(9, 13, {3}), (0, 9, {0, 2})]),
        (40, [(8, 13, {2, 3}), (0, 8, {0})]),
        (1000, [(0, 13, {0, 2, 3})]),
    ],
)
def test_buckets_follow_the_backward_pass(arena, minimum_bytes, expected):
    buckets = [Bucket(start, stop, frozenset(of), DATA) for start, stop, of in expected]
    assert arena.buckets(minimum_bytes, 8) == buckets


def test_tied_tensors_lie_once_and_their_bucket_waits_for_both():
    last = nn.Linear(3, 2, bias=False)
    last.tied = {"weight": "a.weight"}
    layers = {"a": nn.Linear(3, 2, bias=False), "b": nn.Linear(2, 3), "last": last}
    initial = {
        n: layer.parameters(np.random.default_rng(0), np, float) for n, layer in layers.items()
    }
    arena = Arena(layers, shapes(initial))
    assert [tensor.name for tensor in arena.tensors] == ["a.weight", "b.weight", "b.bias"]
    views = arena.views(np.zeros(arena.size))
    views[0]["weight"][0, 0] = 5
    assert views[2]["weight"][0, 0] == 5
    assert {frozenset({0, 2}), frozenset({1})} == {b.layers for b in arena.buckets(1, 8)}


def test_stages_have_what_they_share_in_one_order_and_one_bucket():
    def arena(*names):
        layers = {name: nn.Linear(2, 2) for name in names}
        own = {
            n: layer.parameters(np.random.default_rng(0), np, float) for n, layer in layers.items()
        }
        shared = {f"{name}.{of}": "stages" for name in "ab" for of in ("weight", "bias")}
        return Arena(layers, shapes(own), shared=shared)

    first, last = arena("a", "b", "first"), arena("b", "last", "a")
    for one, other in ((first, last), (last, first)):
        kept = [tensor.name for tensor in one.tensors if tensor.group == "stages"]
        assert kept == [tensor.name for tensor in other.tensors if tensor.group == "stages"]
        (bucket,) = [bucket for bucket in one.buckets(1, 8) if bucket.group == "stages"]
        assert bucket.stop - bucket.start == 12


def test_stages_begin_the_sums_that_they_share_last_and_in_one_order():
    def order(*names):
        layers = {name: nn.Linear(2, 2) for name in names}
        own = {n: {"weight": np.zeros((2, 2)), "bias": np.zeros(2)} for n in names}
        shared = {f"{name}.{of}": f"stages {name}" for name in "ab" for of in ("weight", "bias")}
        return [bucket.group for bucket in Arena(layers, shapes(own), shared=shared).buckets(1, 8)]

    assert order("a", "b", "first") == order("b", "last", "a") == [DATA, "stages a", "stages b"]


def test_a_tensor_rank_has_its_part_and_groups_lie_apart():
    norm = nn.LayerNorm(4)
    norm.summed = frozenset({"weight", "bias"})
    layers = {"up": nn.Linear(3, 5, split="outputs"), "norm": norm, "bias": nn.Bias(2)}
    initial = {
        n: layer.parameters(np.random.default_rng(0), np, float) for n, layer in layers.items()
    }
    arena = Arena(layers, shapes(initial), Ranks())
    weight = arena["up.weight"]
    assert (weight.whole, weight.shape) == ((3, 5), (3, 3))
    whole = np.arange(15).reshape(3, 5)
    assert np.array_equal(weight.part(whole), whole[:, 2:5])
    assert (arena["up.bias"].group, arena["bias.bias"].group) == (DATA, COPIES)
    assert arena["norm.weight"].group == SUMMED
    flat = np.empty(arena.size)
    for index, values in enumerate(initial.values()):
        arena.fill(flat, index, values)
    np.testing.assert_array_equal(arena.views(flat)[0]["weight"], initial["up"]["weight"][:, 2:])
    for bucket in arena.buckets(1000, 8):
        inside = [t.group for t in arena.tensors if bucket.start <= t.start < bucket.stop]
        assert set(inside) == {bucket.group}


def test_a_tensor_rank_has_its_part_of_each_of_several_matrices_side_by_side():
    whole = np.arange(24).reshape(2, 12)
    assert cut(whole, 1, slice(2, 4), 3).tolist() == [
        [2, 3, 6, 7, 10, 11],
        [14, 15, 18, 19, 22, 23],
    ]
    assert cut(whole.T, 0, slice(2, 4), 3).tolist() == cut(whole, 1, slice(2, 4), 3).T.tolist()
    assert cut(whole, None, slice(None)) is whole
