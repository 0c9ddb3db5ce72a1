"""Convolution as one matrix product (im2col)."""

from collections.abc import Mapping
from copy import copy
from math import prod
from typing import Literal

from mpitrain.arrays import Array, Pair, Parameters, Shape, array_namespace
from mpitrain.kernels.host import total
from mpitrain.nn.layer import Initial, Layer, he_deviation, matmul, rounded, widened
from mpitrain.nn.pooling import window_counts, windows
from mpitrain.nn.sizes import expect_image, expect_sizes


class Conv2d(Layer):
    """Cross-correlation of x_NHWC with ``outputs`` square filters: y_NHWO.

    ``padding`` zeros surround each image; filters step by ``stride`` points.  The patches are kept
    for the backward pass: ``size**2 / stride**2`` times the input's memory.
    """

    def __init__(
        self, channels: int, outputs: int, size: int, *, stride: int = 1, padding: int = 0,
        split: Literal["channels", "outputs"] | None = None,
    ) -> None:  # fmt: skip
        """Describe the layer.

        Args:
            channels, outputs: sizes of the last axes of x_NHWC and y_NHWO, over all tensor ranks.
            size: rows and columns of a filter, whose weights have the shape
                (size, size, channels, outputs).
            stride: points between two places of a filter.
            padding: rows and columns of zeros on each side.
            split: axis that the ranks of a tensor group share, as the two columns of AlexNet did
                (Krizhevsky 2012): ``outputs`` gives each rank filters, ``channels`` one term of a
                sum, after which :class:`Bias` comes.

        Raises:
            ValueError: a size or a stride is below 1, or the padding below 0.
        """
        expect_sizes("Conv2d", channels=channels, outputs=outputs, size=size, stride=stride)
        expect_sizes("Conv2d", padding=padding, least=0)
        self.channels = channels
        self.outputs = outputs
        self.size = size
        self.stride = stride
        self.padding = self._above = padding
        self.bias = split != "channels"
        if split == "outputs":
            self.split = {"weight": 3, "bias": 0}
        elif split == "channels":
            self.split = {"weight": 2}

    def without_row_padding(self) -> "Conv2d":
        """The layer for images that have the rows of zeros already."""
        found = copy(self)
        found._above = 0
        return found

    def initial(self) -> Mapping[str, Initial]:
        weight = (self.size, self.size, self.channels, self.outputs)
        deviation = he_deviation(self.size**2 * self.channels)
        bias = {"bias": Initial((self.outputs,))} if self.bias else {}
        return {"weight": Initial(weight, deviation)} | bias

    def output_shape(self, shape: Shape) -> Shape:
        expect_image("convolution", shape, self.channels)
        padded = (shape[0] + 2 * self.padding, shape[1] + 2 * self.padding, shape[2])
        return *window_counts(padded, self.size, self.stride), self.outputs

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, tuple[Array, Shape]]:
        xp = array_namespace(x)
        above, beside = (self._above,) * 2, (self.padding,) * 2
        padded_NHWC = xp.pad(x, ((0, 0), above, beside, (0, 0)))
        patches_NHWKC = xp.stack(tuple(windows(padded_NHWC, self.size, self.stride)), axis=3)
        weight_KO = _matrix(parameters["weight"])
        patches = patches_NHWKC.reshape(prod(patches_NHWKC.shape[:3]), len(weight_KO))
        y = matmul(patches, weight_KO)
        if self.bias:
            y += parameters["bias"]
        return y.reshape(*patches_NHWKC.shape[:3], y.shape[1]), (patches, padded_NHWC.shape)

    def backward(
        self, parameters: Parameters, saved: tuple[Array, Shape], dy: Array
    ) -> tuple[Array, Pair]:
        _, padded_shape = saved
        _, dy_flat = kept = Conv2d.kept(self, parameters, saved, dy)
        dpatches = widened(matmul(dy_flat, _matrix(parameters["weight"]).T))
        dpatches_NHWKC = dpatches.reshape(*dy.shape[:3], self.size**2, padded_shape[3])
        dpadded_NHWC = array_namespace(dy).zeros(padded_shape, dpatches.dtype)
        for element, view in enumerate(windows(dpadded_NHWC, self.size, self.stride)):
            view += dpatches_NHWKC[:, :, :, element, :]
        _, rows, columns, _ = padded_shape
        above, beside = self._above, self.padding
        dx = dpadded_NHWC[:, above : rows - above, beside : columns - beside, :]
        return rounded(dx, dy.dtype), kept

    def kept(self, parameters: Parameters, saved: tuple[Array, Shape], dy: Array) -> Pair:
        return saved[0], dy.reshape(prod(dy.shape[:3]), parameters["weight"].shape[-1])

    def gradients(self, parameters: Parameters, kept: Pair) -> dict[str, Array]:
        patches, dy_flat = kept
        weight = {"weight": matmul(patches.T, dy_flat).reshape(parameters["weight"].shape)}
        return weight | ({"bias": total(dy_flat, axis=0)} if self.bias else {})


def _matrix(weight: Array) -> Array:
    """The filters, a column each."""
    return weight.reshape(prod(weight.shape[:-1]), weight.shape[-1])
