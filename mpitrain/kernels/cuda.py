"""The operations on a GPU: kernels of ``kernels.cu``, compiled by CuPy at their first use.

A launch has a block for each row, or blocks that stride over all elements.  The order of sums
depends on shapes alone.
"""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from mpitrain.arrays import Array, Scalar, is_narrow
from mpitrain.kernels.host import AdamOptions, Kernels, SGDOptions

#: Threads of a block; the kernels are compiled for this number.
THREADS = 256
#: Most blocks that stride over elements: enough for any GPU of today.
_BLOCKS = 1024
#: Rows of a table that a block adds to.
_TABLE_ROWS = 16
#: Values of ``KIND`` in ``kernels.cu`` by the name of a type.
KINDS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 1}


@cache
def source() -> str:
    return files("mpitrain.kernels").joinpath("kernels.cu").read_text(encoding="utf-8")


def options(kind: str) -> tuple[str, ...]:
    """Compiler options for arrays of a type."""
    return ("-std=c++17", f"-DKIND={KINDS[kind]}", f"-DTHREADS={THREADS}")


class CudaKernels(Kernels):
    """The operations by kernels on CuPy's current stream."""

    def __init__(self, xp: ModuleType) -> None:
        self._xp: Any = xp

    def matmul(self, a: Array, b: Array) -> Array:
        # CuPy adds matrices of 16 bits up in float32 by itself, on tensor cores.
        if a.ndim > 2 and b.ndim == 2:
            rows = self._xp.ascontiguousarray(a.reshape(-1, a.shape[-1]))
            return self.matmul(rows, b).reshape(*a.shape[:-1], b.shape[-1])
        return (a @ b).astype(b.dtype, copy=False)

    def gelu(self, x: Array) -> tuple[Array, Array]:
        x = self._dense(x)
        y, tanh = self._like(x), self._like(x)
        self._each("gelu", x, y, tanh, x.size, like=x)
        return y, tanh

    def gelu_gradient(self, x: Array, tanh: Array, dy: Array) -> Array:
        x, dy = self._dense(x), self._dense(dy)
        dx = self._like(x)
        self._each("gelu_gradient", x, tanh, dy, dx, x.size, like=x)
        return dx

    def normalise(self, x: Array, epsilon: float) -> tuple[Array, Array]:
        x = self._dense(x)
        normal, scale = self._like(x), self._scales(x)
        self._rows("normalise", x, normal, scale, epsilon, like=x)
        return normal, scale

    def normalise_gradient(self, dnormal: Array, normal: Array, scale: Array) -> Array:
        dnormal, normal = self._dense(dnormal), self._dense(normal)
        dx = self._like(normal)
        self._rows("normalise_gradient", dnormal, normal, scale, dx, like=normal)
        return dx

    def layer_norm(
        self, x: Array, weight: Array, bias: Array, epsilon: float
    ) -> tuple[Array, Array, Array]:
        x = self._dense(x)
        y, normal, scale = self._like(x), self._like(x), self._scales(x)
        self._rows("layer_norm", x, weight, bias, y, normal, scale, epsilon, like=x)
        return y, normal, scale

    def layer_norm_gradient(self, dy: Array, weight: Array, normal: Array, scale: Array) -> Array:
        dy = self._dense(dy)
        dx = self._like(normal)
        self._rows("layer_norm_gradient", dy, weight, normal, scale, dx, like=normal)
        return dx

    def norm_gradients(self, dy: Array, normal: Array) -> tuple[Array, Array]:
        dy, normal = self._dense(dy), self._dense(normal)
        columns = normal.shape[-1]
        rows = prod(normal.shape[:-1])
        weight, bias = (self._xp.empty(columns, dy.dtype) for _ in range(2))
        blocks = -(-columns // 32)
        self._launch("norm_gradients", blocks, dy, normal, weight, bias, rows, columns, like=dy)
        return weight, bias

    def causal_softmax(self, scores: Array, scale: float) -> Array:
        self._rows("causal_softmax", scores, scale, like=scores)
        return scores

    def causal_softmax_gradient(self, dattention: Array, attention: Array, scale: float) -> Array:
        self._rows("causal_softmax_gradient", dattention, attention, scale, like=attention)
        return dattention

    def softmax_loss(
        self, rows: Array, labels: Array, divisor: float, smoothing: float
    ) -> tuple[Scalar, Array]:
        rows = self._dense(rows)
        losses, gradient = self._xp.empty(len(rows), rows.dtype), self._like(rows)
        labels = self._xp.ascontiguousarray(labels, np.int64)
        given = rows, labels, losses, gradient, float(divisor), smoothing
        self._rows("softmax_loss", *given, like=rows)
        return losses.sum() / divisor, gradient

    def scatter_add(self, rows: Array, values: Array, height: int) -> Array:
        kind, width = values.dtype, values.shape[-1]
        table = self._xp.zeros((height, width), np.float32 if is_narrow(kind) else kind)
        rows = self._xp.ascontiguousarray(rows.reshape(-1), np.int64)
        values = self._dense(values.reshape(-1, width))
        blocks = -(-height // _TABLE_ROWS) if rows.size else 0
        given = table, rows, values, rows.size, height, width
        self._launch("scatter_add", blocks, *given, like=values)
        found: Array = table.astype(kind, copy=False)
        return found

    def sgd(
        self, p: Array, g: Array, velocity: Array, how: SGDOptions, rate: float, scale: float
    ) -> None:
        numbers = float(rate), float(scale), how.momentum, how.weight_decay
        self._each("sgd", p, g, velocity, p.size, *numbers, int(how.nesterov), like=p)

    def adam(
        self, p: Array, g: Array, mean: Array, square: Array, how: AdamOptions, step: int,
        rate: float, scale: float,
    ) -> None:  # fmt: skip
        rates = float(rate), float(scale)
        self._each("adam", p, g, mean, square, p.size, *rates, *_numbers(how, step), like=p)

    def adam_direction(
        self, p: Array, g: Array, mean: Array, square: Array, how: AdamOptions, step: int
    ) -> Array:
        direction = self._like(p)
        given = p, g, mean, square, direction, p.size
        self._each("adam_direction", *given, *_numbers(how, step), like=p)
        return direction

    def square_sum(self, arrays: Sequence[Array]) -> Scalar:
        blocks = [min(_BLOCKS, -(-x.size // THREADS)) for x in arrays]
        partial = self._xp.empty(sum(blocks), np.float64)
        first = 0
        for x, count in zip(arrays, blocks, strict=True):
            part = partial[first : first + count]
            self._launch("square_sums", count, x, x.size, part, like=x)
            first += count
        found = self._xp.empty((), np.float64)
        self._launch("sum_in_order", 1, partial, partial.size, found, like=found)
        return found

    def _each(self, name: str, *arguments: Any, like: Array) -> None:
        """Launches blocks that stride over all elements of ``like``."""
        self._launch(name, min(_BLOCKS, -(-like.size // THREADS)), *arguments, like=like)

    def _rows(self, name: str, *arguments: Any, like: Array) -> None:
        """Launches a block for each row of ``like``; the last argument is the length of a row."""
        columns = like.shape[-1]
        self._launch(name, like.size // max(1, columns), *arguments, columns, like=like)

    def _launch(self, name: str, blocks: int, *arguments: Any, like: Array) -> None:
        if blocks:
            kernel = self._xp.RawKernel(source(), name, options(like.dtype.name))
            kernel((blocks,), (THREADS,), arguments)

    def _like(self, x: Array) -> Array:
        """Empty array of the shape and type of x, in C order."""
        found: Array = self._xp.empty(x.shape, x.dtype)
        return found

    def _scales(self, x: Array) -> Array:
        """Empty array for a number a row of x; float32 for bfloat16, as NumPy has it."""
        kind = np.float32 if x.dtype.name == "bfloat16" else x.dtype
        found: Array = self._xp.empty((*x.shape[:-1], 1), kind)
        return found

    def _dense(self, x: Array) -> Array:
        found: Array = self._xp.ascontiguousarray(x)
        return found


def _numbers(how: AdamOptions, step: int) -> tuple[float | int, ...]:
    """Options of Adam in the order of its kernels' arguments."""
    corrections = 1.0 / (1.0 - how.beta1**step), 1.0 / (1.0 - how.beta2**step) ** 0.5
    numbers = how.beta1, how.beta2, how.epsilon, how.weight_decay, int(how.decoupled)
    return *numbers, *corrections
