"""Every layer's forward against another formula, its backward against finite differences."""

import numpy as np
import pytest
from scipy.signal import correlate
from scipy.special import ndtr

from mpitrain import nn

LAYERS = {
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
}


@pytest.fixture(params=LAYERS, ids=str)
def case(request):
    """(layer, parameters that are not all 0 or 1, input), in float64."""
    layer, shape = LAYERS[request.param]
    rng = np.random.default_rng(7)
    initial = layer.parameters(rng, np, np.float64)
    parameters = {k: v + 0.3 * rng.normal(size=v.shape) for k, v in initial.items()}
    return layer, parameters, rng.normal(size=shape)


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


def test_backward_is_the_derivative_of_forward(case):
    layer, parameters, x = case
    y, saved = layer.forward(parameters, x)
    dy = np.random.default_rng(8).normal(size=y.shape)
    dx, gradients = layer.backward(parameters, saved, dy)

    def scalar():
        return float((layer.forward(parameters, x)[0] * dy).sum())

    assert gradients.keys() == parameters.keys()
    np.testing.assert_allclose(dx, finite_differences(scalar, x), rtol=1e-6, atol=1e-8)
    for name, gradient in gradients.items():
        numeric = finite_differences(scalar, parameters[name])
        np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-8)


def test_output_shape_is_what_forward_returns(case):
    layer, parameters, x = case
    assert layer.output_shape(x.shape[1:]) == layer.forward(parameters, x)[0].shape[1:]


def test_types_stay_and_arguments_are_left_alone(case):
    layer, parameters, x = case
    parameters = {name: value.astype(np.float32) for name, value in parameters.items()}
    x = x.astype(np.float32)
    x_before = x.copy()
    y, saved = layer.forward(parameters, x)
    dy = np.ones_like(y)
    dx, gradients = layer.backward(parameters, saved, dy)
    assert {a.dtype for a in (y, dx, *gradients.values())} == {np.dtype(np.float32)}
    assert {k: v.shape for k, v in gradients.items()} == {k: v.shape for k, v in parameters.items()}
    np.testing.assert_array_equal(x, x_before)
    np.testing.assert_array_equal(dy, 1)


def test_batch_without_samples(case):
    layer, parameters, x = case
    y, saved = layer.forward(parameters, x[:0])
    dx, gradients = layer.backward(parameters, saved, y)
    assert y.shape == (0, *layer.output_shape(x.shape[1:]))
    assert dx.shape == (0, *x.shape[1:])
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 1), (2, 1), (3, 2)])
def test_convolution_against_scipy(stride, padding):
    rng = np.random.default_rng(0)
    layer = nn.Conv2d(3, 4, 3, stride=stride, padding=padding)
    parameters = layer.parameters(rng, np, np.float64)
    parameters["bias"] = rng.normal(size=4)
    x = rng.normal(size=(2, 6, 7, 3))
    y, _ = layer.forward(parameters, x)
    padded = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    for sample in range(2):
        for channel in range(4):
            full = correlate(padded[sample], parameters["weight"][..., channel], mode="valid")
            expected = full[::stride, ::stride, 0] + parameters["bias"][channel]
            np.testing.assert_allclose(y[sample, :, :, channel], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("layer", "reference"), [(nn.MaxPool2d(2), np.max), (nn.AveragePool2d(2), np.mean)]
)
def test_pooling_against_blocks(layer, reference):
    x = np.random.default_rng(0).normal(size=(3, 4, 6, 2))
    blocks = x.reshape(3, 2, 2, 3, 2, 2)
    np.testing.assert_allclose(layer.forward({}, x)[0], reference(blocks, axis=(2, 4)))


def test_of_equal_maxima_one_takes_the_gradient():
    layer = nn.MaxPool2d(2)
    y, saved = layer.forward({}, np.zeros((1, 4, 4, 1)))
    dx, _ = layer.backward({}, saved, np.ones_like(y))
    np.testing.assert_array_equal(dx[0, :, :, 0], np.tile([[1, 0], [0, 0]], (2, 2)))


def test_maximum_does_not_hide_what_is_not_a_number():
    x = np.zeros((1, 2, 2, 1))
    x[0, 1, 0, 0] = np.nan
    assert np.isnan(nn.MaxPool2d(2).forward({}, x)[0]).all()


def test_gelu_is_near_its_definition():
    x = np.linspace(-6, 6, 101)
    np.testing.assert_allclose(nn.GELU().forward({}, x)[0], x * ndtr(x), atol=1e-3)


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
        (nn.LayerNorm(5), (4,)),
        (nn.Conv2d(3, 4, 3), (8, 8, 1)),
        (nn.Conv2d(1, 4, 3), (8, 2, 1)),
        (nn.MaxPool2d(2), (1, 8, 1)),
        (nn.MaxPool2d(2), (8, 8)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(layer, shape):
    with pytest.raises(ValueError, match=r"needed|needs|fit"):
        layer.output_shape(shape)


def test_initial_values_follow_he_and_the_generator():
    layer = nn.Linear(400, 300)
    one, two = (layer.parameters(np.random.default_rng(3), np, np.float64) for _ in range(2))
    np.testing.assert_array_equal(one["weight"], two["weight"])
    assert one["weight"].std() == pytest.approx(np.sqrt(2 / 400), rel=0.02)
    assert not one["bias"].any()


def test_sequential_differentiates_the_whole_chain():
    rng = np.random.default_rng(1)
    chain = nn.Sequential(
        [nn.Conv2d(1, 2, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)]
    )
    parameters = chain.parameters(rng, np, np.float64)
    x = rng.normal(size=(3, 4, 4, 1))
    y, saved = chain.forward(parameters, x)
    assert y.shape == (3, *chain.output_shape((4, 4, 1)))
    dy = rng.normal(size=y.shape)
    gradients = dict(chain.backward(parameters, saved, dy))
    assert list(gradients) == [4, 3, 2, 1, 0]

    def scalar():
        return float((chain.forward(parameters, x)[0] * dy).sum())

    for layer, own in enumerate(parameters):
        for name, value in own.items():
            numeric = finite_differences(scalar, value)
            np.testing.assert_allclose(gradients[layer][name], numeric, rtol=1e-6, atol=1e-8)
