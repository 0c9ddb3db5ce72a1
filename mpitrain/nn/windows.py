"""Sliding windows over images, shared by convolution and pooling."""

from collections.abc import Iterator

from mpitrain.arrays import Array, Shape
from mpitrain.nn.sizes import expect_image


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
