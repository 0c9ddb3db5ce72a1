"""Convolution as one matrix product (im2col)."""

from collections.abc import Mapping

from mpitrain.arrays import Array, Parameters, Shape, array_namespace
from mpitrain.kernels.host import total
from mpitrain.nn.layer import Initial, Layer, he_deviation, matmul
from mpitrain.nn.pooling import window_counts, windows
from mpitrain.nn.sizes import expect_image, expect_sizes


class Conv2d(Layer):
    """Cross-correlation of x_NHWC with ``outputs`` square filters: y_NHWO.

    ``padding`` zeros surround each image; filters step by ``stride`` points.  The patches are kept
    for the backward pass: ``size**2 / stride**2`` times the input's memory.
    """

    def __init__(
        self, channels: int, outputs: int, size: int, *, stride: int = 1, padding: int = 0
    ) -> None:
        """Describe the layer.

        Args:
            channels, outputs: sizes of the last axes of x_NHWC and y_NHWO.
            size: rows and columns of a filter, whose weights have the shape
                (size, size, channels, outputs).
            stride: points between two places of a filter.
            padding: rows and columns of zeros on each side.

        Raises:
            ValueError: a size or a stride is below 1, or the padding below 0.
        """
        expect_sizes("Conv2d", channels=channels, outputs=outputs, size=size, stride=stride)
        expect_sizes("Conv2d", padding=padding, least=0)
        self.channels = channels
        self.outputs = outputs
        self.size = size
        self.stride = stride
        self.padding = padding

    def initial(self) -> Mapping[str, Initial]:
        weight = (self.size, self.size, self.channels, self.outputs)
        deviation = he_deviation(self.size**2 * self.channels)
        return {"weight": Initial(weight, deviation), "bias": Initial((self.outputs,))}

    def output_shape(self, shape: Shape) -> Shape:
        expect_image("convolution", shape, self.channels)
        padded = (shape[0] + 2 * self.padding, shape[1] + 2 * self.padding, shape[2])
        return *window_counts(padded, self.size, self.stride), self.outputs

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, tuple[Array, Shape]]:
        xp = array_namespace(x)
        border = (self.padding, self.padding)
        padded_NHWC = xp.pad(x, ((0, 0), border, border, (0, 0)))
        patches_NHWKC = xp.stack(tuple(windows(padded_NHWC, self.size, self.stride)), axis=3)
        weight_KO = parameters["weight"].reshape(-1, self.outputs)
        patches = patches_NHWKC.reshape(-1, len(weight_KO))
        y = matmul(patches, weight_KO)
        y += parameters["bias"]
        return y.reshape(*patches_NHWKC.shape[:3], self.outputs), (patches, padded_NHWC.shape)

    def backward(
        self, parameters: Parameters, saved: tuple[Array, Shape], dy: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        patches, padded_shape = saved
        weight_KO = parameters["weight"].reshape(-1, self.outputs)
        dy_flat = dy.reshape(-1, self.outputs)
        dpatches_NHWKC = matmul(dy_flat, weight_KO.T).reshape(
            *dy.shape[:3], self.size**2, self.channels
        )
        dpadded_NHWC = array_namespace(dy).zeros(padded_shape, dy.dtype)
        for element, view in enumerate(windows(dpadded_NHWC, self.size, self.stride)):
            view += dpatches_NHWKC[:, :, :, element, :]
        _, rows, columns, _ = padded_shape
        p = self.padding
        return dpadded_NHWC[:, p : rows - p, p : columns - p, :], (patches, dy_flat)

    def gradients(self, parameters: Parameters, kept: tuple[Array, Array]) -> dict[str, Array]:
        patches, dy_flat = kept
        return {
            "weight": matmul(patches.T, dy_flat).reshape(parameters["weight"].shape),
            "bias": total(dy_flat, axis=0),
        }
