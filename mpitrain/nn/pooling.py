"""Sliding windows over images, and pooling: the largest or the mean value of each window."""

from collections.abc import Iterator
from functools import reduce

from mpitrain.arrays import Array, Pair, Parameters, Shape, array_namespace
from mpitrain.nn.layer import Layer, rounded, widened
from mpitrain.nn.sizes import expect_image, expect_sizes


def windows(x_NHWC: Array, size: int, stride: int) -> Iterator[Array]:
    """Views of a window's elements, row by row, each over all window positions.

    A view has shape (N, window rows, window columns, C).  Reading all views is im2col; adding to
    all of them is its adjoint, col2im.
    """
    _, rows, columns, _ = x_NHWC.shape
    for i in range(size):
        for j in range(size):
            yield x_NHWC[
                :, i : rows - size + i + 1 : stride, j : columns - size + j + 1 : stride, :
            ]


def window_counts(shape: Shape, size: int, stride: int) -> tuple[int, int]:
    """Window positions along the rows and columns of an (H, W, C) image.

    Raises:
        ValueError: ``shape`` is not that of an image, or the window does not fit into it.
    """
    expect_image("window", shape)
    rows, columns, _ = shape
    if min(rows, columns) < size:
        raise ValueError(
            f"a {size}x{size} window does not fit into an image of {rows}x{columns} points"
        )
    return (rows - size) // stride + 1, (columns - size) // stride + 1


class _Pool2d(Layer):
    """Windows of ``size`` x ``size`` points at steps of ``stride`` (default: ``size``).

    Points on the right and below that fill no whole window are left out.
    """

    def __init__(self, size: int, *, stride: int | None = None) -> None:
        """A window has ``size`` rows and columns; ``stride`` points are between two.

        Raises:
            ValueError: a number is below 1.
        """
        stride = size if stride is None else stride
        expect_sizes(type(self).__name__, size=size, stride=stride)
        self.size = size
        self.stride = stride

    def output_shape(self, shape: Shape) -> Shape:
        return *window_counts(shape, self.size, self.stride), shape[2]


class MaxPool2d(_Pool2d):
    """Largest value of each window of x_NHWC; of equal values, the first takes the gradient."""

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Pair]:
        y = reduce(array_namespace(x).maximum, windows(x, self.size, self.stride))
        return y, (x, y)

    def backward(self, parameters: Parameters, saved: Pair, dy: Array) -> tuple[Array, None]:
        x, y = saved
        xp = array_namespace(x)
        wide = widened(dy)
        dx = xp.zeros(x.shape, wide.dtype)
        unclaimed = xp.ones(y.shape, bool)
        for value, gradient in zip(
            windows(x, self.size, self.stride), windows(dx, self.size, self.stride), strict=True
        ):
            largest = unclaimed & (value == y)
            gradient += wide * largest
            unclaimed &= ~largest
        return rounded(dx, dy.dtype), None


class AveragePool2d(_Pool2d):
    """Mean value of each window of x_NHWC."""

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Shape]:
        summed = reduce(array_namespace(x).add, windows(widened(x), self.size, self.stride))
        return rounded(summed / self.size**2, x.dtype), x.shape

    def backward(self, parameters: Parameters, saved: Shape, dy: Array) -> tuple[Array, None]:
        part = widened(dy) / self.size**2
        dx = array_namespace(dy).zeros(saved, part.dtype)
        for gradient in windows(dx, self.size, self.stride):
            gradient += part
        return rounded(dx, dy.dtype), None


class GlobalAveragePool(Layer):
    """Mean of each channel over the image: x_NHWC to y_NC."""

    def output_shape(self, shape: Shape) -> Shape:
        expect_image("global average", shape)
        return shape[2:]

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Shape]:
        return rounded(widened(x).mean(axis=(1, 2)), x.dtype), x.shape

    def backward(self, parameters: Parameters, saved: Shape, dy: Array) -> tuple[Array, None]:
        _, rows, columns, _ = saved
        means = (dy / (rows * columns))[:, None, None, :]
        return array_namespace(dy).broadcast_to(means, saved), None
