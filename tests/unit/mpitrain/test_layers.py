"""Every layer's forward against another formula, its backward against finite differences."""

import re
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from mpitrain import nn
from mpitrain.group import TensorGroup
from mpitrain.models.recommender import SpreadTables
from mpitrain.nn.context import RESTING
from mpitrain.nn.embedding import PositionEmbedding, TokenEmbedding, Unembedding


class Halved:
    """Half of the layer whose class is beside this one."""

    def forward(self, parameters, x):
        y, saved = super().forward(parameters, x)
        return y / 2, saved

    def backward(self, parameters, saved, dy):
        return super().backward(parameters, saved, dy / 2)


def half(kind):
    return type(f"Half{kind.__name__}", (Halved, kind), {})


LAYERS = {
    "half a linear": (half(nn.Linear)(5, 3), (4, 5)),
    "half a convolution": (half(nn.Conv2d)(2, 3, 3), (2, 5, 4, 2)),
    "half a chain": (half(nn.Chain)({"up": nn.Linear(3, 4), "gelu": nn.GELU()}), (5, 3)),
    "wrapper": (nn.Wrapper(nn.Linear(3, 2)), (4, 3)),
    "linear": (nn.Linear(5, 3), (4, 5)),
    "linear, one input": (nn.Linear(1, 2), (3, 1)),
    "linear on two leading axes": (nn.Linear(4, 2), (2, 3, 4)),
    "convolution": (nn.Conv2d(2, 3, 3), (2, 5, 4, 2)),
    "convolution, padded": (nn.Conv2d(1, 2, 3, padding=1), (3, 4, 5, 1)),
    "convolution, strided over an odd size": (nn.Conv2d(2, 2, 3, stride=2), (2, 7, 6, 2)),
    "convolution, strided and padded": (nn.Conv2d(2, 1, 2, stride=3, padding=2), (1, 5, 7, 2)),
    "convolution, 1x1": (nn.Conv2d(3, 2, 1), (2, 3, 3, 3)),
    "maximum": (nn.MaxPool2d(2), (2, 4, 6, 3)),
    "maximum, odd size": (nn.MaxPool2d(2), (2, 5, 3, 2)),
    "maximum, overlapping": (nn.MaxPool2d(3, stride=2), (1, 7, 6, 2)),
    "average": (nn.AveragePool2d(2), (2, 4, 6, 3)),
    "average, overlapping": (nn.AveragePool2d(3, stride=1), (2, 4, 5, 2)),
    "layer norm": (nn.LayerNorm(6), (4, 6)),
    "layer norm on two leading axes": (nn.LayerNorm(5), (2, 3, 5)),
    "relu": (nn.ReLU(), (4, 5)),
    "gelu": (nn.GELU(), (4, 5)),
    "flatten": (nn.Flatten(), (2, 3, 4, 2)),
    "linear without bias": (nn.Linear(3, 2, bias=False), (4, 3)),
    "bias": (nn.Bias(4), (2, 3, 4)),
    "group norm": (nn.GroupNorm(2, 6), (3, 2, 4, 6)),
    "global average": (nn.GlobalAveragePool(), (2, 3, 4, 5)),
    "attention, one head": (nn.CausalAttention(4), (2, 5, 12)),
    "attention, three heads": (nn.CausalAttention(2), (2, 4, 18)),
    "attention to all positions": (nn.Attention(2), (2, 4, 18)),
    "residual": (nn.Residual({"norm": nn.LayerNorm(4), "mix": nn.Linear(4, 4)}), (3, 4)),
    "residual, shortcut": (nn.Residual({"a": nn.Linear(4, 3)}, {"b": nn.Linear(4, 3)}), (3, 4)),
    "recomputed": (nn.Recomputed(nn.Chain({"a": nn.Linear(3, 3), "b": nn.GELU()})), (4, 3)),
    "positions": (PositionEmbedding(6, 3, TensorGroup(), sequence=False), (2, 4, 3)),
    "scores": (Unembedding(5, 3, "there"), (2, 4, 3)),
}

TABLES = {
    "tokens": TokenEmbedding(7, 3, TensorGroup()),
    "tables": SpreadTables(4, 7, 3, TensorGroup()),
}


@pytest.fixture(params=LAYERS, ids=str)
def case(request):
    """(layer, parameters that are not all 0 or 1, input), in float64."""
    layer, shape = LAYERS[request.param]
    rng = np.random.default_rng(7)
    initial = layer.parameters(rng, np, np.float64)
    parameters = {k: v + 0.3 * rng.normal(size=v.shape) for k, v in initial.items()}
    return layer, parameters, rng.normal(size=shape)


def backward(layer, parameters, saved, dy):
    """The gradients by the input and by the parameters."""
    dx, kept = layer.backward(parameters, saved, dy)
    return dx, layer.gradients(parameters, kept)


def finite_differences(function, x, step=1e-6):
    """Central differences of the scalar ``function()`` by every element of ``x``, in place."""
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        middle = x[index]
        x[index] = middle + step
        above = function()
        x[index] = middle - step
        gradient[index] = (above - function()) / (2 * step)
        x[index] = middle
    return gradient


def expect_slopes(layer, parameters, x, saved, dy):
    """The gradients are finite differences, also by inputs that are no integers."""

    def scalar():
        return float((layer.forward(parameters, x)[0] * dy).sum())

    dx, gradients = backward(layer, parameters, saved, dy)
    assert gradients.keys() == parameters.keys()
    values = parameters | ({"x": x} if x.dtype.kind == "f" else {})
    for name, gradient in {"x": dx, **gradients}.items():
        if name in values:
            numeric = finite_differences(scalar, values[name])
            np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-8)


def expect_shapes(layer, parameters):
    assert [*layer.shapes().items()] == [(k, values.shape) for k, values in parameters.items()]


def test_backward_is_the_derivative_of_forward(case):
    layer, parameters, x = case
    y, saved = layer.forward(parameters, x)
    expect_shapes(layer, parameters)
    assert layer.output_shape(x.shape[1:]) == y.shape[1:]
    dy = np.random.default_rng(8).normal(size=y.shape)
    expect_slopes(layer, parameters, x, saved, dy)
    if parameters:  # as where the layer comes first
        found = layer.gradients(parameters, layer.kept(parameters, saved, dy))
        np.testing.assert_equal(found, backward(layer, parameters, saved, dy)[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_types_stay_and_arguments_are_left_alone(case, dtype):
    layer, parameters, x = case
    parameters = {name: value.astype(dtype) for name, value in parameters.items()}
    x = x.astype(dtype)
    x_before = x.copy()
    y, saved = layer.forward(parameters, x)
    dy = np.ones_like(y)
    dx, gradients = backward(layer, parameters, saved, dy)
    assert {a.dtype for a in (y, dx, *gradients.values())} == {np.dtype(dtype)}
    assert {k: v.shape for k, v in gradients.items()} == {k: v.shape for k, v in parameters.items()}
    np.testing.assert_array_equal(x, x_before)
    np.testing.assert_array_equal(dy, 1)


def test_batch_without_samples(case):
    layer, parameters, x = case
    y, saved = layer.forward(parameters, x[:0])
    dx, gradients = backward(layer, parameters, saved, y)
    assert y.shape == (0, *layer.output_shape(x.shape[1:]))
    assert dx.shape == (0, *x.shape[1:])
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 1), (2, 1), (3, 2)])
def test_convolution_is_a_sum_over_windows(stride, padding):
    rng = np.random.default_rng(0)
    layer = nn.Conv2d(3, 4, 3, stride=stride, padding=padding)
    weight, bias = layer.parameters(rng, np, np.float64)["weight"], rng.normal(size=4)
    x, border = rng.normal(size=(2, 6, 7, 3)), (padding, padding)
    padded = np.pad(x, ((0, 0), border, border, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    expected = np.einsum("nhwcij,ijco->nhwo", windows[:, ::stride, ::stride], weight) + bias
    y, _ = layer.forward({"weight": weight, "bias": bias}, x)
    np.testing.assert_allclose(y, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("layer", "reference"), [(nn.MaxPool2d(2), np.max), (nn.AveragePool2d(2), np.mean)]
)
def test_pooling_against_blocks(layer, reference):
    x = np.random.default_rng(0).normal(size=(3, 4, 6, 2))
    blocks = x.reshape(3, 2, 2, 3, 2, 2)
    np.testing.assert_allclose(layer.forward({}, x)[0], reference(blocks, axis=(2, 4)))


def test_equal_maxima_and_maxima_that_are_no_numbers():
    """One of equal values takes the gradient; NaN is not hidden."""
    layer, x = nn.MaxPool2d(2), np.zeros((1, 4, 4, 1))
    y, saved = layer.forward({}, x)
    dx, _ = layer.backward({}, saved, np.ones_like(y))
    np.testing.assert_array_equal(dx[0, :, :, 0], np.tile([[1, 0], [0, 0]], (2, 2)))
    x[0, 1, 0, 0] = np.nan
    assert np.isnan(layer.forward({}, x)[0][0, :, :, 0]).tolist() == [[True, False], [False] * 2]


def test_layer_norm_normalises():
    x = 5 + 3 * np.random.default_rng(0).normal(size=(4, 1000))
    layer = nn.LayerNorm(1000)
    y, _ = layer.forward(layer.parameters(np.random.default_rng(0), np, np.float64), x)
    np.testing.assert_allclose(y.mean(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose(y.std(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(5, 3), (4,)),
        (nn.GroupNorm(2, 16), (4, 16)),
        (nn.Conv2d(3, 4, 3), (8, 8, 1)),
        (nn.Conv2d(1, 4, 3), (8, 2, 1)),
        (nn.MaxPool2d(2), (8, 8)),
        (nn.CausalAttention(4), (3, 16)),
        (nn.Residual({"wider": nn.Linear(3, 4)}), (3,)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(layer, shape):
    with pytest.raises(ValueError, match=r"needed|needs|fit|cannot"):
        layer.output_shape(shape)


@pytest.mark.parametrize(
    ("layer", "sizes", "name", "least", "found"),
    [
        (nn.Linear, (3, 2.5), "outputs", 1, 2.5),
        (partial(nn.Conv2d, padding=-1), (1, 2, 3), "padding", 0, -1),
        (nn.MaxPool2d, (0,), "size", 1, 0),
        (nn.GroupNorm, (0, 4), "groups", 1, 0),
    ],
)
def test_sizes_that_cannot_be_are_refused_where_the_layer_is_made(layer, sizes, name, least, found):
    kind = getattr(layer, "func", layer).__name__
    told = f"{kind}: {name} is a whole number of at least {least}, not {found}"
    with pytest.raises(ValueError, match=re.escape(told)):
        layer(*sizes)


def test_initial_values_follow_he_and_the_generator():
    layer = nn.Linear(400, 300)
    one, two = (layer.parameters(np.random.default_rng(3), np, np.float64) for _ in range(2))
    np.testing.assert_array_equal(one["weight"], two["weight"])
    assert one["weight"].std() == pytest.approx(np.sqrt(2 / 400), rel=0.02)
    assert not one["bias"].any()


@pytest.mark.parametrize("layer", TABLES.values(), ids=TABLES)
def test_tables_take_gradients_of_every_time_a_row_is_asked_for(layer):
    rng = np.random.default_rng(2)
    parameters = layer.parameters(rng, np, np.float64)
    expect_shapes(layer, parameters)
    x = rng.integers(0, 7, (5, 4))
    y, saved = layer.forward(parameters, x)
    assert y.shape == (5, *layer.output_shape((4,)))
    expect_slopes(layer, parameters, x, saved, rng.normal(size=y.shape))


def test_a_recomputed_layer_keeps_its_input_alone():
    layer = nn.Recomputed(nn.Chain({"a": nn.Linear(3, 300), "b": nn.GELU()}))
    x = np.ones((2, 3))
    _, saved = layer.forward(layer.parameters(np.random.default_rng(0), np, np.float64), x)
    assert saved[0] is x and saved[1:] == (RESTING,)


class Told(nn.Bias):
    """Says all that a layer may say of a parameter."""

    split = {"bias": 0}  # noqa: RUF012
    summed = frozenset({"bias"})
    spread = frozenset({"bias"})
    placed = {"bias": 0}  # noqa: RUF012
    fused = {"bias": 2}  # noqa: RUF012
    tied = {"bias": "another.bias"}  # noqa: RUF012


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [
        (nn.Chain({"own": Told(4)}), "own.bias"),
        (nn.Recomputed(Told(4)), "bias"),
        (nn.Residual({"own": Told(4)}), "body.own.bias"),
        (nn.Residual({"own": nn.ReLU()}, {"own": Told(4)}), "shortcut.own.bias"),
        (nn.Recomputed(nn.Chain({"up": nn.Residual({"own": Told(4)})})), "up.body.own.bias"),
    ],
    ids=["chain", "recomputed", "residual", "shortcut", "deep"],
)
def test_nothing_that_a_layer_says_gets_lost_in_another_one(wrapped, name):
    assert set(vars(Told)) >= set(nn.Layer.__annotations__)
    for attribute in nn.Layer.__annotations__:
        assert list(getattr(wrapped, attribute)) == [name], attribute
    assert wrapped.split[name] == 0
    assert wrapped.tied[name] == "another.bias"


def test_a_bias_with_split_inputs_would_be_added_once_a_rank():
    with pytest.raises(ValueError, match=r"nn\.Bias"):
        nn.Linear(3, 4, split="inputs")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_gelu_of_sixteen_bits_is_rounded_once(dtype):
    x = np.array([-3.5, -3, -2.25, -1, -0.5, 50, 86, 300], dtype)
    y, (_, tanh) = nn.GELU().forward({}, x)
    wide, (_, wide_tanh) = nn.GELU().forward({}, x.astype(np.float32))
    assert y.tolist() == wide.astype(dtype).tolist()
    assert tanh.tolist() == wide_tanh.astype(dtype).tolist()
    dx, _ = nn.GELU().backward({}, (x, tanh), np.ones_like(x))
    rounded = x.astype(np.float32), tanh.astype(np.float32)
    wide_dx, _ = nn.GELU().backward({}, rounded, np.ones(len(x), np.float32))
    assert dx.tolist() == wide_dx.astype(dtype).tolist()


SUMS = {
    "linear": (nn.Linear(4096, 1, bias=False), (1, 4096)),
    "bias": (nn.Bias(2), (600, 2)),
    "positions": (PositionEmbedding(3, 2, TensorGroup(), sequence=False), (600, 3, 2)),
    "convolution": (nn.Conv2d(1, 1, 17), (1, 33, 33, 1)),
    "average": (nn.AveragePool2d(32), (1, 32, 32, 2)),
    "average, overlapping": (nn.AveragePool2d(17, stride=1), (1, 33, 33, 1)),
    "global average": (nn.GlobalAveragePool(), (1, 32, 32, 2)),
}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("layer", "shape"), SUMS.values(), ids=SUMS)
def test_sixteen_bits_add_up_in_thirty_two(layer, shape, dtype):
    """Sums of ones are those of 32 bits, rounded once."""

    def results(kind):
        shapes = layer.shapes().items()
        parameters = {name: np.full(size, name != "bias", kind) for name, size in shapes}
        y, saved = layer.forward(parameters, np.ones(shape, kind))
        dx, gradients = backward(layer, parameters, saved, np.ones_like(y))
        return [y, dx, *gradients.values()]

    for found, right in zip(results(dtype), results(np.float32), strict=True):
        assert found.tobytes() == right.astype(dtype).tobytes()


@pytest.mark.parametrize("kind", [np.uint8, np.int64, bool])
def test_a_product_is_of_the_type_of_its_weights(kind):
    parameters = {"weight": np.full((3, 1), 0.5, np.float32), "bias": np.float32([0.25])}
    y, _ = nn.Linear(3, 1).forward(parameters, np.ones(3, kind))
    assert y.dtype == np.float32 and y.tolist() == [1.75]


@pytest.mark.parametrize(
    ("layers", "choices"),
    [
        ({"tokens": TABLES["tokens"], "up": nn.Linear(3, 2)}, 7),
        ({"flat": nn.Flatten(), "inner": nn.Chain(TABLES)}, 7),
        ({"up": nn.Linear(3, 2), "tokens": TABLES["tokens"]}, 0),
        ({"flat": nn.Flatten()}, 0),
    ],
    ids=["table", "flattened", "numbers", "no parameters"],
)
def test_the_first_layer_with_parameters_decides_what_integers_are(layers, choices):
    assert nn.Recomputed(nn.Chain(layers)).choices == choices
