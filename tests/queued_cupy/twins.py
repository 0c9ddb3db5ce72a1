"""The kernels of ``mpitrain/kernels/kernels.cu`` by NumPy, with the lines of the CPU.

A run on the stand-in has the numbers of one on the CPU, digit for digit.
"""

import numpy as np

from mpitrain.kernels import HOST
from mpitrain.kernels.host import AdamOptions, SGDOptions, cross_entropy


def moments(step_numbers):
    """The options, and the step whose corrections these are."""
    beta1, beta2, epsilon, decay, decoupled, first, second = step_numbers
    how = AdamOptions(beta1, beta2, epsilon, decay, bool(decoupled))
    found = next(
        step
        for step in range(1, 10000)
        if 1.0 / (1.0 - beta1**step) == first and 1.0 / (1.0 - beta2**step) ** 0.5 == second
    )
    return how, found


def gelu(x, y, tanh, n):
    y[...], tanh[...] = HOST.gelu(x)


def gelu_gradient(x, tanh, dy, dx, n):
    dx[...] = HOST.gelu_gradient(x, tanh, dy)


def normalise(x, normal, scale, epsilon, columns):
    normal[...], scale[...] = HOST.normalise(x, epsilon)


def normalise_gradient(dnormal, normal, scale, dx, columns):
    dx[...] = HOST.normalise_gradient(dnormal.copy(), normal, scale)


def layer_norm(x, weight, bias, y, normal, scale, epsilon, columns):
    y[...], normal[...], scale[...] = HOST.layer_norm(x, weight, bias, epsilon)


def layer_norm_gradient(dy, weight, normal, scale, dx, columns):
    dx[...] = HOST.layer_norm_gradient(dy, weight, normal, scale)


def norm_gradients(dy, normal, weight, bias, rows, columns):
    weight[...], bias[...] = HOST.norm_gradients(dy, normal)


def causal_softmax(scores, scale, positions):
    HOST.causal_softmax(scores, scale)


def causal_softmax_gradient(dattention, attention, scale, positions):
    HOST.causal_softmax_gradient(dattention, attention, scale)


def softmax_loss(rows, labels, losses, gradient, divisor, smoothing, columns):
    losses[...], gradient[...] = cross_entropy(rows, labels, divisor, smoothing, columns)


def scatter_add(table, rows, values, count, height, width):
    table[...] = HOST.scatter_add(rows, values.astype(table.dtype), height)


def sgd(p, g, velocity, n, rate, scale, momentum, decay, nesterov):
    HOST.sgd(p, g, velocity, SGDOptions(momentum, decay, bool(nesterov)), rate, scale)


def adam(p, g, mean, square, n, rate, scale, *numbers):
    HOST.adam(p, g, mean, square, *moments(numbers), rate, scale)


def adam_direction(p, g, mean, square, direction, n, *numbers):
    direction[...] = HOST.adam_direction(p, g, mean, square, *moments(numbers))


def square_sums(x, n, partial):
    partial[...] = 0
    partial[0] = HOST.square_sum([x])


def sum_in_order(partial, n, found):
    found[...] = sum(np.asarray(partial).tolist())
