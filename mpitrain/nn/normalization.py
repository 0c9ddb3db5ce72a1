"""Normalisation within a sample: other samples have no influence, so ranks need not communicate."""

from collections.abc import Mapping

from mpitrain.arrays import Array, Parameters, Shape
from mpitrain.kernels import kernels_of
from mpitrain.nn.layer import Elementwise, Initial
from mpitrain.nn.sizes import expect_features, expect_image, expect_sizes

#: The normalised input, and the reciprocal of its standard deviation.
_Saved = tuple[Array, Array]
#: The gradient by the output, and the normalised input.
_Kept = tuple[Array, Array]


class LayerNorm(Elementwise):
    """``weight * (x - mean) / sqrt(variance + epsilon) + bias`` over the last axis (Ba 2016)."""

    by_point = True

    def __init__(self, features: int, *, epsilon: float = 1e-5) -> None:
        """``features``: size of the last axis, before and after; ``ValueError`` below 1."""
        expect_sizes(type(self).__name__, features=features)
        self.features = features
        self.epsilon = epsilon

    def initial(self) -> Mapping[str, Initial]:
        shape = (self.features,)
        return {"weight": Initial(shape, mean=1.0), "bias": Initial(shape)}

    def output_shape(self, shape: Shape) -> Shape:
        expect_features("layer norm", self.features, shape)
        return shape

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, _Saved]:
        y, normal, scale = kernels_of(x).layer_norm(
            x, parameters["weight"], parameters["bias"], self.epsilon
        )
        return y, (normal, scale)

    def backward(self, parameters: Parameters, saved: _Saved, dy: Array) -> tuple[Array, _Kept]:
        normal, scale = saved
        dx = kernels_of(dy).layer_norm_gradient(dy, parameters["weight"], normal, scale)
        return dx, (dy, normal)

    def gradients(self, parameters: Parameters, kept: _Kept) -> dict[str, Array]:
        weight, bias = kernels_of(kept[0]).norm_gradients(*kept)
        return {"weight": weight, "bias": bias}


class GroupNorm(LayerNorm):
    """Normalisation over the points of an image and a group of its channels (Wu & He 2018): x_NHWC.

    Unlike batch normalisation, it needs no statistics of other ranks' samples.  With ``split``, the
    ranks of a tensor group have some of the groups each.
    """

    def __init__(
        self, groups: int, features: int, *, epsilon: float = 1e-5, split: bool = False
    ) -> None:
        """``features``: size of the last axis; ``ValueError`` unless ``groups`` divides it."""
        expect_sizes("GroupNorm", groups=groups, features=features)
        if features % groups:
            raise ValueError(f"{features} channels cannot be normed in {groups} equal groups")
        super().__init__(features, epsilon=epsilon)
        self.width = features // groups
        if split:
            self.split = {"weight": 0, "bias": 0}

    def output_shape(self, shape: Shape) -> Shape:
        expect_image("group norm", shape, self.features)
        return shape

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, _Saved]:
        grouped, scale = self._normalised(self._by_group(x), x.shape)
        normal = self._by_point(grouped, x.shape)
        y = normal * parameters["weight"]
        y += parameters["bias"]
        return y, (normal, scale)

    def backward(self, parameters: Parameters, saved: _Saved, dy: Array) -> tuple[Array, _Kept]:
        normal, scale = saved
        dnormal, grouped = self._by_group(dy * parameters["weight"]), self._by_group(normal)
        dx = self._gradient(dnormal, grouped, scale, dy.shape)
        return self._by_point(dx, normal.shape), (dy, normal)

    def _normalised(self, x: Array, shape: Shape) -> tuple[Array, Array]:
        """``x`` of images of this shape, by group, normalised; and its reciprocal deviation."""
        return kernels_of(x).normalise(x, self.epsilon)

    def _gradient(self, dnormal: Array, normal: Array, scale: Array, shape: Shape) -> Array:
        return kernels_of(dnormal).normalise_gradient(dnormal, normal, scale)

    def _by_group(self, x_NHWC: Array) -> Array:
        n, rows, columns, channels = x_NHWC.shape
        groups = channels // self.width
        x_NPGC = x_NHWC.reshape(n, rows * columns, groups, self.width)
        return x_NPGC.transpose(0, 2, 1, 3).reshape(n, groups, rows * columns * self.width)

    def _by_point(self, x: Array, shape: Shape) -> Array:
        n, rows, columns, channels = shape
        x_NGPC = x.reshape(n, channels // self.width, rows * columns, self.width)
        return x_NGPC.transpose(0, 2, 1, 3).reshape(shape)
