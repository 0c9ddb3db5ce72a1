"""Self-attention over the heads and the positions that a rank has."""

from math import sqrt
from typing import Any

from mpitrain.arrays import Array, Parameters, Shape, array_namespace
from mpitrain.group import TensorGroup
from mpitrain.kernels import kernels_of
from mpitrain.nn.context import RESTING, Context
from mpitrain.nn.dropout import dropout_mask
from mpitrain.nn.layer import Layer, widened
from mpitrain.nn.positions import Positions, Tile
from mpitrain.nn.ring_attention import Attended, BlockAttention, Drop, attend, attend_back
from mpitrain.nn.sizes import expect_sizes
from mpitrain.nn.ulysses import heads_of, to_heads, to_positions


class Attention(Layer):
    """``softmax(q k / sqrt(E)) v`` of each head (Vaswani 2017).

    x_NT(3D) holds queries, keys and values of E numbers, head by head, so that ranks can share the
    heads; the output is y_NTD.  Scores are held for a tile of queries and one of keys at a time,
    and the backward pass computes them again.

    Attributes:
        head_width: E.
        dropout: probability with which a position does not see another one in training.
    """

    sees = True
    causal = False

    def __init__(
        self, head_width: int, dropout: float = 0.0, group: TensorGroup | None = None
    ) -> None:
        """``group``: ranks that share the heads.

        Raises:
            ValueError: a width below 1, or no probability.
        """
        expect_sizes(type(self).__name__, head_width=head_width)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout = {dropout}: a probability from 0 to less than 1")
        self.head_width = head_width
        self.dropout = dropout
        self._group = group or TensorGroup()

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 2 or shape[1] % (3 * self.head_width):
            raise ValueError(
                f"attention needs (positions, heads x 3 x {self.head_width}), not {shape}"
            )
        return shape[0], shape[1] // 3

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, Any]:
        samples, length, width = x.shape
        heads = width // (3 * self.head_width)
        by_head = x.reshape(samples, length, heads, 3, self.head_width).transpose(3, 0, 2, 1, 4)
        qkv = array_namespace(x).ascontiguousarray(by_head)
        positions = context.positions or Positions(TensorGroup(), length)
        own, spread = slice(0, heads), None
        if positions.way == "ulysses" and positions.are_split:
            own, spread = heads_of(heads, positions)[positions.group.rank], positions
            qkv, positions = to_heads(qkv, spread), positions.whole
        first = self._group.rank * heads
        own = slice(first + own.start, first + own.stop)
        drop = self._drop(context) if context.training and self.dropout else None
        blocks = BlockAttention(1.0 / sqrt(self.head_width), self.causal, own, drop)
        y_NHTE, saved = self._attend(qkv, blocks, positions)
        if spread:
            (y_NHTE,) = to_positions(y_NHTE[None], spread, heads)
        y = y_NHTE.transpose(0, 2, 1, 3).reshape(samples, length, heads * self.head_width)
        return y.astype(x.dtype, copy=False), (spread, saved)

    def backward(
        self, parameters: Parameters, saved: tuple[Positions | None, Any], dy: Array
    ) -> tuple[Array, None]:
        xp, (samples, length, width) = array_namespace(dy), dy.shape
        heads, wide, (spread, inner) = width // self.head_width, widened(dy), saved
        by_head = wide.reshape(samples, length, heads, self.head_width).transpose(0, 2, 1, 3)
        dx = xp.empty((samples, length, heads, 3, self.head_width), wide.dtype)
        dqkv = dx.transpose(3, 0, 2, 1, 4)
        if spread:
            (there,) = to_heads(by_head[None], spread)
            whole = xp.empty((3, *there.shape), wide.dtype)
            self._back(inner, there, whole)
            dqkv[...] = to_positions(whole, spread, heads)
        else:
            self._back(inner, xp.ascontiguousarray(by_head), dqkv)
        return dx.reshape(samples, length, 3 * width).astype(dy.dtype, copy=False), None

    def _attend(
        self, qkv: Array, blocks: BlockAttention, positions: Positions
    ) -> tuple[Array, Any]:
        """Attention of qkv_3NHTE: y_NHTE, and the values for :meth:`_back`."""
        return attend(blocks, qkv, positions)

    def _back(self, saved: Any, dy: Array, dqkv: Array) -> None:
        """Write the gradient by qkv_3NHTE for dy_NHTE."""
        dqkv[...] = attend_back(saved, dy)

    def _drop(self, context: Context) -> Drop:
        def factors(heads: slice, tile: Tile) -> Array:
            shape = heads.stop - heads.start, len(tile.queries), len(tile.keys)
            first = heads.start, tile.queries, tile.keys
            found = dropout_mask(context, self.dropout, shape, first)
            assert found is not None
            return found

        return factors


class CausalAttention(Attention):
    """Attention in which no position sees a later one.

    Positions of one tile that a rank has all of some heads go by the kernels of the host or the GPU
    in one piece, and their scores are kept.
    """

    causal = True

    def _attend(
        self, qkv: Array, blocks: BlockAttention, positions: Positions
    ) -> tuple[Array, Any]:
        if positions.are_split or positions.length > positions.tile or blocks.drop:
            return super()._attend(qkv, blocks, positions)
        q, k, v = widened(qkv)
        scores = q @ k.swapaxes(-1, -2)
        attention = kernels_of(q).causal_softmax(scores, blocks.scale)
        return attention @ v, (q, k, v, attention)

    def _back(self, saved: Any, dy: Array, dqkv: Array) -> None:
        if isinstance(saved, Attended):
            super()._back(saved, dy, dqkv)
            return
        q, k, v, attention = saved
        dattention = dy @ v.swapaxes(-1, -2)
        scale = 1.0 / sqrt(self.head_width)
        dscores = kernels_of(dy).causal_softmax_gradient(dattention, attention, scale)
        dqkv[0] = dscores @ k
        dqkv[1] = dscores.swapaxes(-1, -2) @ q
        dqkv[2] = attention.swapaxes(-1, -2) @ dy
