"""Layout of a rank's tensors: one after another in flat arrays.

So the optimiser and the hash see one array, a bucket of gradients is a slice that never moves, with
an all-reduce that is bound once, and a shard is a range of elements.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from mpitrain.arrays import Array, Parameters, Shape
from mpitrain.group import TensorGroup, cut
from mpitrain.nn import Layer

#: Gradients are summed over the replicas that have the same part of what is spread over replicas.
SPREAD = "spread"
#: Gradients are summed over the replicas of this part of the model.
DATA = "data"
#: Gradients are summed over the replicas; the ranks of a tensor group hold equal copies.
COPIES = "copies"
#: Gradients are summed over the replicas and the tensor group, whose ranks have one term each.
SUMMED = "summed"


def copies_of(group: str) -> str:
    """Name of a group, for tensors of which the ranks of a tensor group hold equal copies."""
    return f"{group}, {COPIES}"


@dataclass(frozen=True)
class Tensor:
    """A parameter of the model, and the part of it that this rank has.

    Attributes:
        name: name in the model, as in ``block0.mlp.up.weight``.
        whole: shape of the whole parameter.
        shape: shape of this rank's part.
        axis, bounds, blocks: the part is ``bounds`` in each of ``blocks`` equal runs along
            ``axis``; None: the part is the whole.
        group: ranks that sum its gradient: :data:`DATA`, :data:`COPIES`, :data:`SUMMED`,
            :data:`SPREAD` or the name of a group of pipeline stages that share it.
        start: first element in the flat arrays.
    """

    name: str
    whole: Shape
    shape: Shape
    axis: int | None
    bounds: slice | None
    group: str
    start: int
    blocks: int = 1

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + prod(self.shape)

    def part(self, whole: Array) -> Array:
        """The own part of the whole parameter, or of an array of its shape."""
        found: Array = cut(whole, self.axis, self.bounds or slice(None), self.blocks)
        return found


@dataclass(frozen=True)
class Bucket:
    """Elements ``start <= i < stop``: the gradients of some consecutive layers.

    Attributes:
        start, stop: element indices.
        layers: numbers of the layers.
        group: group of the tensors.
    """

    start: int
    stop: int
    layers: frozenset[int]
    group: str


class Arena:
    """The layout of the parameters of some layers.

    Attributes:
        tensors: tensors in the order of memory; tied ones are one tensor.
        size: elements of all tensors.
        users: indices of the layers that have a tensor, by its name.
    """

    def __init__(
        self, layers: Mapping[str, Layer], shapes: Mapping[str, Mapping[str, Shape]],
        group: TensorGroup | None = None, shared: Mapping[str, str] | None = None,
        replicas: TensorGroup | None = None,
    ) -> None:  # fmt: skip
        """Lay out ``layers``, which may have no parameters at all.

        Args:
            layers: layers by their names in the model, in order.
            shapes: whole shapes of each layer's parameters.
            group: ranks that share each layer.
            shared: group of the pipeline stages that share a tensor, by the tensor's name.
            replicas: ranks on which tensors are spread or placed.
        """
        group = group or TensorGroup()
        replicas = replicas or TensorGroup()
        found: dict[str, Tensor] = {}
        self._names: list[dict[str, str]] = []
        self.users = users = dict[str, set[int]]()
        for index, (name, layer) in enumerate(layers.items()):
            self._names.append({})
            for own, shape in shapes[name].items():
                full = layer.tied.get(own, f"{name}.{own}")
                self._names[-1][own] = full
                users.setdefault(full, set()).add(index)
                axis = layer.split.get(own) if group.size > 1 else None
                kind = DATA if axis is not None or group.size == 1 else COPIES
                kind = SUMMED if own in layer.summed and group.size > 1 else kind
                blocks = layer.fused.get(own, 1)
                bounds = None if axis is None else group.share(shape[axis] // blocks)
                if own in layer.spread:
                    axis, bounds, kind = 0, replicas.share(shape[0]), SPREAD
                elif own in layer.placed and replicas.size > 1:
                    kind = SPREAD
                    if layer.placed[own] != replicas.rank:
                        axis, bounds = 0, slice(0, 0)
                if (stages := (shared or {}).get(full)) is not None:
                    kind = copies_of(stages) if kind == COPIES else stages
                part = shape
                if axis is not None and bounds is not None:
                    size = blocks * (bounds.stop - bounds.start)
                    part = (*shape[:axis], size, *shape[axis + 1 :])
                found[full] = Tensor(full, shape, part, axis, bounds, kind, 0, blocks)
        # Group after group, so that a bucket is contiguous; sort() keeps the order of layers.
        # Tensors that stages share have one order on all of them, where layers have another one.
        kinds = (shared or {}).values()
        self._shared = frozenset([*kinds, *map(copies_of, kinds)])

        def place(tensor: Tensor) -> tuple[str, str]:
            return tensor.group, tensor.name if tensor.group in self._shared else ""

        tensors, start = list[Tensor](), 0
        for tensor in sorted(found.values(), key=place):
            tensors.append(replace(tensor, start=start))
            start = tensors[-1].stop
        self.tensors = tuple(tensors)
        self.size = start
        self._starts = [tensor.start for tensor in tensors]
        self._by_name = {tensor.name: tensor for tensor in tensors}
        self._users = {name: frozenset(layers) for name, layers in users.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._by_name[name]

    @property
    def groups(self) -> list[str]:
        """The groups of the tensors, in the order of memory."""
        return list(dict.fromkeys(tensor.group for tensor in self.tensors))

    def views(self, flat: Array) -> list[dict[str, Array]]:
        """The tensors of each layer by name, as views into ``flat``, of shape (size,)."""
        return [
            {own: self._view(flat, self._by_name[full]) for own, full in names.items()}
            for names in self._names
        ]

    def names(self, layer: int) -> dict[str, str]:
        """The names in the model of a layer's parameters."""
        return self._names[layer]

    def inside(self, bucket: Bucket, flat: Array) -> dict[str, Array]:
        """The tensors of ``bucket``, by name, as views into its elements ``flat``."""
        first = bisect_left(self._starts, bucket.start)
        stop = bisect_right(self._starts, bucket.stop)
        return {
            t.name: flat[t.start - bucket.start : t.stop - bucket.start].reshape(t.shape)
            for t in self.tensors[first:stop]
            if t.stop <= bucket.stop
        }

    def within(self, layer: int, bucket: Bucket, flat: Array) -> dict[str, Array]:
        """The tensors of a layer that lie in ``bucket``, as views into its elements ``flat``."""
        inside = self.inside(bucket, flat)
        return {own: inside[full] for own, full in self._names[layer].items() if full in inside}

    def fill(self, flat: Array, layer: int, values: Parameters) -> None:
        """Write own parts of a layer's whole parameters into ``flat``; ValueError: other shapes."""
        given = {own: value.shape for own, value in values.items()}
        said = {own: self._by_name[full].whole for own, full in self._names[layer].items()}
        if given != said:
            raise ValueError(f"parameters() gives the shapes {given}, and shapes() says {said}")
        for own, full in self._names[layer].items():
            tensor = self._by_name[full]
            self._view(flat, tensor)[...] = tensor.part(values[own])

    def buckets(self, minimum_bytes: int, itemsize: int) -> list[Bucket]:
        """Cut the gradients into buckets, in the order in which their sums begin.

        A bucket belongs to one group, holds whole layers, and has at least ``minimum_bytes`` bytes,
        except for a group's last one.  Tensors that the same stages share are one bucket, as their
        layers are others on each stage.  Groups follow in the order of the layers that end them,
        and then those of several stages, in the order that all stages have in memory.
        """
        buckets = []
        for group in self.groups:
            tensors = [tensor for tensor in self.tensors if tensor.group == group]
            stop, layers = tensors[-1].stop, frozenset[int]()
            for position in reversed(range(len(tensors))):
                tensor = tensors[position]
                layers |= self._users[tensor.name]
                first = position == 0
                whole = first or self._users[tensors[position - 1].name] != self._users[tensor.name]
                enough = (stop - tensor.start) * itemsize >= minimum_bytes
                if first or (whole and enough and group not in self._shared):
                    buckets.append(Bucket(tensor.start, stop, layers, group))
                    stop, layers = tensor.start, frozenset()

        def turn(bucket: Bucket) -> tuple[bool, int, int]:
            is_shared = bucket.group in self._shared
            return is_shared, 0 if is_shared else -min(bucket.layers), bucket.start

        return sorted(buckets, key=turn)

    def _view(self, flat: Array, tensor: Tensor) -> Array:
        return flat[tensor.start : tensor.stop].reshape(tensor.shape)
