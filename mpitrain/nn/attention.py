"""Causal self-attention over the heads that a rank has."""

from math import sqrt

from mpitrain.arrays import Array, Parameters, Shape, array_namespace
from mpitrain.kernels import kernels_of
from mpitrain.nn.layer import Layer, widened
from mpitrain.nn.sizes import expect_sizes

#: Queries, keys, values, and the attention of each query to each key.
_Saved = tuple[Array, Array, Array, Array]


class CausalAttention(Layer):
    """``softmax(q k / sqrt(E)) v`` of each head; no position sees a later one (Vaswani 2017).

    x_NT(3D) holds queries, keys and values of E numbers, head by head, so that ranks can share the
    heads; the output is y_NTD.  Saves T x T numbers a head and sample.
    """

    def __init__(self, head_width: int) -> None:
        """``head_width``: E, numbers of a query; ``ValueError`` below 1."""
        expect_sizes("CausalAttention", head_width=head_width)
        self.head_width = head_width

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 2 or shape[1] % (3 * self.head_width):
            raise ValueError(
                f"attention needs (positions, heads x 3 x {self.head_width}), not {shape}"
            )
        return shape[0], shape[1] // 3

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, _Saved]:
        xp = array_namespace(x)
        samples, positions, width = x.shape
        heads = width // (3 * self.head_width)
        x, narrow = widened(x), x.dtype
        by_head = x.reshape(samples, positions, heads, 3, self.head_width).transpose(3, 0, 2, 1, 4)
        q, k, v = xp.ascontiguousarray(by_head)
        scores = q @ k.swapaxes(-1, -2)
        attention = kernels_of(x).causal_softmax(scores, 1.0 / sqrt(self.head_width))
        y_NHTE = attention @ v
        y = y_NHTE.transpose(0, 2, 1, 3).reshape(samples, positions, heads * self.head_width)
        return y.astype(narrow, copy=False), (q, k, v, attention)

    def backward(self, parameters: Parameters, saved: _Saved, dy: Array) -> tuple[Array, None]:
        xp = array_namespace(dy)
        dy, narrow = widened(dy), dy.dtype
        q, k, v, attention = saved
        samples, heads, positions, width = q.shape
        dy_NHTE = dy.reshape(samples, positions, heads, width).transpose(0, 2, 1, 3)
        dy_NHTE = xp.ascontiguousarray(dy_NHTE)
        dattention = dy_NHTE @ v.swapaxes(-1, -2)
        scale = 1.0 / sqrt(width)
        dscores = kernels_of(dy).causal_softmax_gradient(dattention, attention, scale)
        dx = xp.empty((samples, positions, heads, 3, width), dy.dtype)
        by_head = dx.transpose(3, 0, 2, 1, 4)
        by_head[0] = dscores @ k
        by_head[1] = dscores.swapaxes(-1, -2) @ q
        by_head[2] = attention.swapaxes(-1, -2) @ dy_NHTE
        dx = dx.reshape(samples, positions, 3 * heads * width)
        return dx.astype(narrow, copy=False), None
