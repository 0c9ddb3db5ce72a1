"""Images that the ranks of a group share in rows (spatial parallelism, Dryden et al. 2019).

Each rank has a run of the rows of every image.  A window that reaches over the end of a run needs a
halo, rows of other ranks, which come before the layer goes forward; their gradients go back to
where the rows lie, and are added there.  The ranks compute the layers behind the last image alike,
each of them for a part of the loss, so that all gradients are sums over the group.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, cast

from mpitrain.arrays import Array, Parameters, Shape, array_namespace
from mpitrain.group import TensorGroup, share
from mpitrain.nn.activation import Flatten
from mpitrain.nn.attention import Attention, CausalAttention
from mpitrain.nn.batch_norm import BatchNorm
from mpitrain.nn.chain import Chain, Recomputed, Residual, Wrapper
from mpitrain.nn.context import RESTING, Context
from mpitrain.nn.convolution import Conv2d
from mpitrain.nn.dropout import Dropout
from mpitrain.nn.layer import Layer, widened
from mpitrain.nn.normalization import GroupNorm
from mpitrain.nn.pooling import AveragePool2d, GlobalAveragePool, MaxPool2d


class Rows:
    """The cut of an image's rows among ranks: runs in rank order, which differ by one row at most.

    With more ranks than rows, some ranks have none.
    """

    #: Whether the labels of a sample are cut, too.
    cuts_labels = False

    def __init__(self, group: TensorGroup, height: int) -> None:
        self.group, self.height = group, height

    def of(self, rank: int) -> slice:
        """The rows of a rank of the group."""
        return share(self.height, rank, self.group.size)

    @property
    def own(self) -> slice:
        """The rows of this rank."""
        return self.of(self.group.rank)

    def windows(self, outputs: int, size: int, stride: int, padding: int) -> "Fetch":
        """The rows under a layer's windows, for a cut of its ``outputs`` rows."""
        return Fetch(self, under_windows(outputs, size, stride, padding, self.group.size))

    def all(self) -> "Fetch":
        """All rows, for each rank."""
        return Fetch(self, [slice(0, self.height)] * self.group.size)


def under_windows(outputs: int, size: int, stride: int, padding: int, ranks: int) -> list[slice]:
    """The rows that each rank's windows read, where ranks share ``outputs`` rows of windows."""
    found = []
    for rank in range(ranks):
        own = share(outputs, rank, ranks)
        first = own.start * stride - padding
        rows = (own.stop - own.start - 1) * stride + size if own.stop > own.start else 0
        found.append(slice(first, first + rows))
    return found


class Fetch:
    """Rows that each rank needs, from the ranks that have them; rows beyond the image are zeros.

    A pass sends each row to each other rank that needs it, in one all-to-all-v, or nothing where
    all ranks need their own rows alone.
    """

    def __init__(self, rows: Rows, needed: Sequence[slice]) -> None:
        """``needed``: the rows that each rank needs, in rank order; they may begin below 0."""
        self._group, ranks = rows.group, range(rows.group.size)
        have, me = [rows.of(rank) for rank in ranks], rows.group.rank
        self._had, self._count = have[me], needed[me].stop - needed[me].start
        #: Places in our rows of those that a rank needs, and in ours of those that it has.
        self._out = [_within(have[me], needed[rank]) for rank in ranks]
        self._in = [_within(needed[me], have[rank]) for rank in ranks]
        self._is_sent = any(
            _length(_within(have[a], needed[b])) for a in ranks for b in ranks if a != b
        )

    def take(self, x: Array) -> Array:
        """The rows that this rank needs, of its own rows x_NHWC and those of others; collective."""
        return self._move(x, self._count, self._out, self._in)

    def give(self, dy: Array) -> Array:
        """The adjoint: gradients of this rank's rows, from all ranks that took them; collective."""
        return self._move(dy, _length(self._had), self._in, self._out)

    def _move(self, x: Array, rows: int, away: Sequence[slice], here: Sequence[slice]) -> Array:
        """Sums of the parts ``away[r]`` of x, which are for rank r, at their places ``here``."""
        xp, me = array_namespace(x), self._group.rank
        samples, _, *rest = x.shape
        found = xp.zeros((samples, rows, *rest), x.dtype)
        found[:, here[me]] += x[:, away[me]]
        if self._is_sent:
            nothing = slice(0, 0)
            parts = [x[:, nothing if to == me else part] for to, part in enumerate(away)]
            lengths = [0 if of == me else _length(part) for of, part in enumerate(here)]
            shapes = [(samples, length, *rest) for length in lengths]
            # Each part goes straight to its rank; most pairs of ranks have none for each other.
            for of, part in enumerate(self._group.exchange(parts, shapes, "linear")):
                if of != me:
                    found[:, here[of]] += part
        return found


def _within(rows: slice, others: slice) -> slice:
    """The places in ``rows`` of those that are among ``others``, too."""
    start = max(rows.start, others.start)
    stop = max(start, min(rows.stop, others.stop))
    return slice(start - rows.start, stop - rows.start) if stop > start else slice(0, 0)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


class InRows(Wrapper):
    """A layer that fetches rows before it goes forward, or behind it, or both."""

    def __init__(
        self, layer: Layer, whole: Layer, before: Fetch | None = None, behind: Fetch | None = None
    ) -> None:
        """``whole``: the layer of whole images in whose place this one stands."""
        super().__init__(layer)
        self._whole, self._before, self._behind = whole, before, behind

    def output_shape(self, shape: Shape) -> Shape:
        return self._whole.output_shape(shape)

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, Any]:
        x = self._before.take(x) if self._before else x
        y, saved = super().forward(parameters, x, context)
        return self._behind.take(y) if self._behind else y, saved

    def backward(self, parameters: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        dy = self._behind.give(dy) if self._behind else dy
        dx, kept = super().backward(parameters, saved, dy)
        return self._before.give(dx) if self._before else dx, kept


class GroupNormInRows(GroupNorm):
    """Group norm over all rows of an image; it adds up two numbers a group and sample twice
    forward and once backward."""

    def __init__(self, like: GroupNorm, rows: Rows) -> None:
        vars(self).update(vars(like))
        self._rows = rows

    def _normalised(self, x: Array, shape: Shape) -> tuple[Array, Array]:
        wide = widened(x)
        wide = wide - self._mean(wide, shape)
        variance = self._mean(wide * wide, shape)
        scale = 1.0 / array_namespace(x).sqrt(variance + self.epsilon)
        return (wide * scale).astype(x.dtype, copy=False), scale

    def _gradient(self, dnormal: Array, normal: Array, scale: Array, shape: Shape) -> Array:
        kind, dnormal, normal = dnormal.dtype, widened(dnormal), widened(normal)
        both = array_namespace(dnormal).stack([dnormal, dnormal * normal])
        along_mean, along_normal = self._mean(both, shape)
        dx = (dnormal - along_mean - normal * along_normal) * scale
        return dx.astype(kind, copy=False)

    def _mean(self, values: Array, shape: Shape) -> Array:
        """Means along the last axis, over the rows of all ranks, of images of this shape here."""
        sums = self._rows.group.sum(values.sum(axis=-1, keepdims=True))
        found: Array = sums / (self._rows.height * shape[2] * self.width)
        return found


class GlobalAveragePoolInRows(GlobalAveragePool):
    """Mean of each channel over all rows of an image: one sum over the group in each pass."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, Shape]:
        sums = self._rows.group.sum(widened(x).sum(axis=(1, 2)))
        return (sums / (self._rows.height * x.shape[2])).astype(x.dtype, copy=False), x.shape

    def backward(self, parameters: Parameters, saved: Shape, dy: Array) -> tuple[Array, None]:
        means = self._rows.group.sum(widened(dy)) / (self._rows.height * saved[2])
        means = means.astype(dy.dtype, copy=False)[:, None, None, :]
        return array_namespace(dy).broadcast_to(means, saved), None


def in_rows(layers: Mapping[str, Layer], shape: Shape, group: TensorGroup) -> dict[str, Layer]:
    """Layers on images of ``shape`` (rows, columns, channels), of which each rank has some rows.

    The outputs are whole on each rank; the layers that are given stay as they are.

    Raises:
        ValueError: samples are no images, or ranks cannot share the rows that a layer works on.
    """
    if len(shape) != 3:
        raise ValueError(
            f"ranks share the rows of images (rows, columns, channels), and samples have the shape "
            f"{shape}; set parallel.space = 1"
        )
    found, is_cut = _Cutter(group).chain("", layers, shape, True)
    if is_cut:
        name, layer = found.popitem()
        images = Chain(layers).output_shape(shape)
        found[name] = InRows(layer, layers[name], behind=Rows(group, images[0]).all())
    return found


class _Cutter:
    """Makes layers whose input lies on the ranks of a group, in rows or, if not cut, whole.

    Each method returns also whether the output is cut.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def chain(
        self, path: str, layers: Mapping[str, Layer], shape: Shape, is_cut: bool
    ) -> tuple[dict[str, Layer], bool]:
        """Layers one after the other; ``path``: the name of what they are in."""
        found = {}
        for name, layer in layers.items():
            inside = ".".join(filter(None, (path, name)))
            found[name], is_cut = self._layer(inside, layer, shape, is_cut)
            shape = layer.output_shape(shape)
        return found, is_cut

    def _layer(self, path: str, layer: Layer, shape: Shape, is_cut: bool) -> tuple[Layer, bool]:
        match layer:
            case Residual() if type(layer) is Residual:
                branches = {
                    name: self.chain(f"{path}.{name}", cast(Chain, one).layers, shape, is_cut)
                    for name, one in layer.layers.items()
                }
                layer.output_shape(shape)  # both branches end in one shape: of rows, or without
                return Residual(*(own for own, _ in branches.values())), branches["body"][1]
            case Wrapper() if type(layer) in (Wrapper, Recomputed):
                found, is_cut = self.chain(path, layer.layers, shape, is_cut)
                return type(layer)(found[""]), is_cut
            case Chain() if type(layer) is Chain:
                found, is_cut = self.chain(path, layer.layers, shape, is_cut)
                return Chain(found), is_cut
        return self._of_rows(path, layer, shape) if is_cut else (self._whole(path, layer), False)

    def _of_rows(self, path: str, layer: Layer, shape: Shape) -> tuple[Layer, bool]:
        """A layer that is made of no others, on a rank's rows of images of this shape."""
        kind, rows = type(layer), Rows(self._group, shape[0])
        match layer:
            case Conv2d() if kind is Conv2d:
                outputs, padding = layer.output_shape(shape)[0], layer.padding
                fetch = rows.windows(outputs, layer.size, layer.stride, padding)
                return InRows(layer.without_row_padding(), layer, fetch), True
            case MaxPool2d() | AveragePool2d() if kind in (MaxPool2d, AveragePool2d):
                fetch = rows.windows(layer.output_shape(shape)[0], layer.size, layer.stride, 0)
                return InRows(layer, layer, fetch), True
            case GroupNorm() if kind is GroupNorm:
                return GroupNormInRows(layer, rows), True
            case Dropout() if kind is Dropout:
                masked = copy(layer)
                masked.first_row = rows.own.start
                return masked, True
            case GlobalAveragePool() if kind is GlobalAveragePool:
                return GlobalAveragePoolInRows(rows), False
            case Flatten() if kind is Flatten:
                return InRows(layer, layer, rows.all()), False
        if vars(kind).get("by_point"):
            return layer, True
        raise ValueError(
            f"{path} is a {kind.__name__}, and ranks cannot share the rows that it works on; put "
            "it behind nn.GlobalAveragePool or nn.Flatten, set by_point = True in its class if it "
            "works on each point of an image by itself, or set parallel.space = 1"
        )

    def _whole(self, path: str, layer: Layer) -> Layer:
        """A layer behind the images, which all ranks of the group compute for the same samples."""
        if type(layer) is BatchNorm:
            norm = copy(layer)
            norm.copies = self._group.size
            return norm
        if layer.sees and type(layer) not in (Dropout, Attention, CausalAttention):
            raise ValueError(
                f"{path} is a {type(layer).__name__}, which may count the samples of all ranks, "
                "and those that share images have the same ones; set parallel.space = 1"
            )
        return layer
