"""Operations of layers, losses and optimisers, by NumPy."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np

from mpitrain.arrays import Array, Scalar, array_namespace, is_narrow

#: ``sqrt(2 / pi)``, and the cubic term's factor, of GELU.
GELU_SCALE = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715
#: Numbers of an array that are computed at a time, where all that follows from them fits the cache.
_BLOCK = 1 << 15


@dataclass(frozen=True)
class SGDOptions:
    """Options of :class:`mpitrain.optim.optimizers.SGD`."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class AdamOptions:
    """Options of :class:`mpitrain.optim.optimizers.Adam`."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False


def _rounded_once(method: Callable[..., Any]) -> Callable[..., Any]:
    """Computes with 16-bit floats in float32, and rounds the results once, as a device does."""

    @wraps(method)
    def computed(self: "Kernels", x: Array, *rest: Any) -> Any:
        if not is_narrow(x.dtype):
            return method(self, x, *rest)
        wide = (one.astype(np.float32) if isinstance(one, type(x)) else one for one in rest)
        found = method(self, x.astype(np.float32), *wide)
        if isinstance(found, tuple):
            return tuple(one.astype(x.dtype) for one in found)
        return found.astype(x.dtype)

    return computed


class Kernels:
    """The operations by NumPy, or by a namespace that has its functions.

    Shapes: N samples, H heads, T positions, R rows, C columns.  On a GPU, nothing here waits.
    """

    def matmul(self, a: Array, b: Array) -> Array:
        """``a_..K @ b_KC``, or products of equally many matrices, in the type of b.

        16-bit floats are added in float32.
        """
        wide = [x.astype(np.float32) if is_narrow(b.dtype) else x for x in (a, b)]
        return _product(*wide).astype(b.dtype, copy=False)

    @_rounded_once
    def gelu(self, x: Array) -> tuple[Array, Array]:
        """GELU of x, and its tanh for the gradient."""
        # In place where it can be: these arrays are the largest of a transformer.
        inner = x * x
        inner *= GELU_SCALE * GELU_CUBIC
        inner += GELU_SCALE
        inner *= x
        tanh = array_namespace(x).tanh(inner, out=inner)
        y = tanh.copy()
        y += 1.0
        y *= x
        y *= 0.5
        return y, tanh

    @_rounded_once
    def gelu_gradient(self, x: Array, tanh: Array, dy: Array) -> Array:
        slope = x * x
        slope *= 3.0 * GELU_SCALE * GELU_CUBIC
        slope += GELU_SCALE
        slope *= x
        rest = tanh * tanh
        slope -= slope * rest
        slope += tanh
        slope += 1.0
        slope *= dy
        slope *= 0.5
        return slope

    @_rounded_once
    def normalise(self, x: Array, epsilon: float) -> tuple[Array, Array]:
        """x minus its mean along the last axis, times s; and s: ``1 / sqrt(variance + epsilon)``"""
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        scale = 1.0 / array_namespace(x).sqrt(variance + epsilon)
        centred *= scale
        return centred, scale

    @_rounded_once
    def normalise_gradient(self, dnormal: Array, normal: Array, scale: Array) -> Array:
        """Gradient by x; may overwrite ``dnormal``."""
        along_mean = dnormal.mean(axis=-1, keepdims=True)
        along_normal = (dnormal * normal).mean(axis=-1, keepdims=True)
        dnormal -= along_mean
        dnormal -= normal * along_normal
        dnormal *= scale
        return dnormal

    @_rounded_once
    def layer_norm(
        self, x: Array, weight: Array, bias: Array, epsilon: float
    ) -> tuple[Array, Array, Array]:
        """``normal * weight + bias``, and the results of :meth:`normalise`."""
        normal, scale = self.normalise(x, epsilon)
        y = normal * weight
        y += bias
        return y, normal, scale

    @_rounded_once
    def layer_norm_gradient(self, dy: Array, weight: Array, normal: Array, scale: Array) -> Array:
        return self.normalise_gradient(dy * weight, normal, scale)

    def norm_gradients(self, dy: Array, normal: Array) -> tuple[Array, Array]:
        """Gradients by weight and bias: sums over all axes but the last one."""
        batch_axes = tuple(range(dy.ndim - 1))
        return total(dy * normal, axis=batch_axes), total(dy, axis=batch_axes)

    def causal_softmax(self, scores: Array, scale: float) -> Array:
        """Softmax of ``scale * scores_..TT`` without later positions; overwrites ``scores``."""
        xp = array_namespace(scores)
        positions = scores.shape[-1]
        later = xp.triu(xp.ones((positions, positions), bool), 1)
        scores *= scale
        xp.copyto(scores, -xp.inf, where=later)
        scores -= scores.max(axis=-1, keepdims=True)
        attention = xp.exp(scores, out=scores)
        attention /= attention.sum(axis=-1, keepdims=True)
        return attention

    def causal_softmax_gradient(self, dattention: Array, attention: Array, scale: float) -> Array:
        """Gradient by the scores; overwrites ``dattention``."""
        dattention -= (dattention * attention).sum(axis=-1, keepdims=True)
        dattention *= attention
        dattention *= scale
        return dattention

    def softmax_loss(
        self, rows: Array, labels: Array, divisor: float, smoothing: float
    ) -> tuple[Scalar, Array]:
        """Sum of the cross-entropies of rows_RC with labels_R over ``divisor``, and its gradient, a
        new array."""
        losses, gradient = cross_entropy(rows, labels, divisor, smoothing, rows.shape[1])
        return losses.sum() / divisor, gradient

    def scatter_add(self, rows: Array, values: Array, height: int) -> Array:
        """A table of ``height`` rows: sums of ``values[i]`` at ``rows[i]``, if that is not below 0.

        Each number is added up in the order of i; 16-bit floats are in float32, rounded once.
        """
        kind, kept = values.dtype, rows >= 0
        table = np.zeros((height, values.shape[-1]), np.float32 if is_narrow(kind) else kind)
        np.add.at(table, rows[kept], values[kept].astype(table.dtype, copy=False))
        return table.astype(kind, copy=False)

    def sgd(
        self, p: Array, g: Array, velocity: Array, how: SGDOptions, rate: float, scale: float
    ) -> None:
        """Updates ``p`` along ``scale * g``."""
        for own, gradient, moved in _in_cache(p, g, velocity):
            if scale != 1.0:
                gradient *= scale
            direction = sgd_direction(own, gradient, moved, how)
            direction *= rate
            own -= direction

    def adam(
        self, p: Array, g: Array, mean: Array, square: Array, how: AdamOptions, step: int,
        rate: float, scale: float,
    ) -> None:  # fmt: skip
        """Updates ``p`` along ``scale * g``; ``step`` counts from 1."""
        for own, gradient, first, second in _in_cache(p, g, mean, square):
            if scale != 1.0:
                gradient *= scale
            direction = self.adam_direction(own, gradient, first, second, how, step)
            direction *= rate
            own -= direction

    def adam_direction(
        self, p: Array, g: Array, mean: Array, square: Array, how: AdamOptions, step: int
    ) -> Array:
        """Direction of Adam's step, without the rate."""
        xp = array_namespace(p)
        g = g if how.decoupled else decayed(p, g, how.weight_decay)
        _average(mean, g, how.beta1)
        _average(square, g * g, how.beta2)
        root = xp.sqrt(square)
        root *= 1.0 / math.sqrt(1.0 - how.beta2**step)
        root += how.epsilon
        direction: Array = mean / root
        direction *= 1.0 / (1.0 - how.beta1**step)
        if how.decoupled and how.weight_decay:
            direction += how.weight_decay * p
        return direction

    def square_sum(self, arrays: Sequence[Array]) -> Scalar:
        """Sum of the squares of all elements, in float64."""
        return sum(map(_square_sum, arrays))


HOST = Kernels()


def _in_cache(*arrays: Array) -> Iterator[list[Array]]:
    """Parts of several arrays in step, so small that what is computed stays in cache."""
    for start in range(0, len(arrays[0]), _BLOCK):
        yield [one[start : start + _BLOCK] for one in arrays]


def total(x: Array, axis: int | tuple[int, ...]) -> Array:
    """Sum along axes; 16-bit floats are added in float32 and rounded once."""
    if not is_narrow(x.dtype):
        return x.sum(axis=axis)
    summed: Array = x.astype(np.float32).sum(axis=axis).astype(x.dtype)
    return summed


def decayed(p: Array, g: Array, weight_decay: float) -> Array:
    """New array: the gradient plus weight decay."""
    found: Array = g + weight_decay * p if weight_decay else g.copy()
    return found


def sgd_direction(p: Array, g: Array, velocity: Array, how: SGDOptions) -> Array:
    """New array: the direction of a step; updates ``velocity``."""
    direction = decayed(p, g, how.weight_decay)
    velocity *= how.momentum
    velocity += direction
    if how.nesterov:
        return direction + how.momentum * velocity
    direction[...] = velocity
    return direction


def _alone(x: Array) -> Array:
    return x


def cross_entropy(
    rows: Array, labels: Array, divisor: float, smoothing: float, classes: int, start: int = 0,
    largest: Callable[[Array], Array] = _alone, sums: Callable[[Array], Array] = _alone,
) -> tuple[Array, Array]:  # fmt: skip
    """Cross-entropy of each row, and the gradient of their sum over ``divisor``.

    Args:
        rows: scores_RC of this rank's classes, from class ``start`` on.
        labels: labels_R among all classes.
        divisor: number by which the gradient is divided.
        smoothing: part of each label that is spread evenly over the classes.
        classes: number of classes on all ranks that share a row.
        start: this rank's first class.
        largest, sums: maximum and sum over these ranks of arrays with one number for each row.
    """
    xp = array_namespace(rows)
    count, columns = rows.shape
    column = labels - start
    own = (column >= 0) & (column < columns)
    where = xp.arange(count), xp.where(own, column, 0)
    even, sharp = smoothing / classes, 1 - smoothing
    most = rows.max(axis=1) if columns else xp.full(count, -xp.inf, rows.dtype)
    shifted = rows - largest(most)[:, None]
    none = rows.dtype.type(0)
    picked = xp.zeros((2, count), rows.dtype)
    if columns:
        picked[0] = xp.where(own, sharp * shifted[where], none)
    if even:
        picked[0] += even * shifted.sum(axis=1)
    gradient = xp.exp(shifted, out=shifted)
    picked[1] = gradient.sum(axis=1)
    picked = sums(picked)
    losses = xp.log(picked[1]) - picked[0]
    gradient /= picked[1][:, None]
    if columns:
        gradient[where] -= xp.where(own, rows.dtype.type(sharp), none)
    if even:
        gradient -= even
    gradient /= divisor
    return losses, gradient


def _product(a: Array, b: Array) -> Array:
    if a.ndim > 2 and b.ndim == 2:
        # One product of matrices: many small ones take longer, most of all on a GPU.
        rows = a.reshape(-1, a.shape[-1])
        return (rows @ b).reshape(*a.shape[:-1], b.shape[-1])
    return a @ b


def _average(old: Array, new: Array, kept: float) -> None:
    """Move an average; where nothing is kept, a difference would lose small new values."""
    if kept:
        old += (1.0 - kept) * (new - old)
    else:
        old[...] = new


@np.errstate(over="ignore")
def _square_sum(x: Array) -> float:
    total, step = 0.0, 1 << 20 if x.dtype == np.float64 else _BLOCK
    for start in range(0, x.size, step):
        part = x[start : start + step]
        own = float(part @ part) if x.dtype == np.float32 else 0.0
        if not 1e-20 < own < 1e30:  # some squares may be too small or too large for float32
            part = part.astype(np.float64, copy=False)
            own = float(part @ part)
        total += own
    return total
