"""Work and memory of a model's layers, from their shapes alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from mpitrain import nn
from mpitrain.arrays import Shape
from mpitrain.models import SequentialModel
from mpitrain.nn.embedding import PositionEmbedding, Unembedding
from mpitrain.nn.positions import TILE, Way
from mpitrain.parallel.tensor_parallel import Enter, Leave


@dataclass(frozen=True)
class LayerCost:
    """A layer with one sample; tensor ranks share what lies between its Enter and its Leave.

    Attributes:
        name: the layer's name.
        forward: work of a forward pass: operations of matrix products, or seconds.
        backward: work of a backward pass.
        kept: numbers that the forward pass keeps for the backward pass, whole on each tensor rank.
        kept_shared: further ones, of which each tensor rank keeps its part.
        outputs: numbers of the output.
        parameters: numbers of the parameters, all of which tensor ranks share.
        summed: numbers of the all-reduces over the tensor ranks, forward and backward; those of the
            loss of split scores, which all come forward, count as if half came backward.
        placed: parameters that lie on one rank each where experts are spread.
        tied: parameters of the first layer that a stage without that layer holds, too.
        rows: numbers that go to experts, or come from spread tables, and as many go back.
        keys: numbers of the keys and values that context ranks tell one another.
        scores: attention's scores, which are kept where neither context ranks nor tiles cut them.
        fixed: seconds of a forward pass that no number of samples changes; a backward pass has two.
        unshared: part of the work that each tensor rank does whole.
        among_positions: by the way in which ranks share positions: the part of the work that each
            does whole, and further ``fixed`` seconds for each other rank whose keys come in turn.
        behind: part of the work that is behind the images, which ranks that share them all do.
        kept_behind, outputs_behind: numbers that they all have there.
        told: numbers of halos, sums and images that these ranks tell one another in a pass.
    """

    name: str
    forward: float
    backward: float
    kept: float
    kept_shared: float
    outputs: float
    parameters: float
    summed: tuple[float, ...] = ()
    placed: float = 0.0
    tied: float = 0.0
    rows: float = 0.0
    keys: float = 0.0
    scores: float = 0.0
    fixed: float = 0.0
    unshared: float = 0.0
    among_positions: Mapping[Way, tuple[float, float]] = field(default_factory=dict)
    behind: float = 0.0
    kept_behind: float = 0.0
    outputs_behind: float = 0.0
    told: float = 0.0

    @property
    def forward_unshared(self) -> float:
        """Work of a forward pass that each tensor rank does whole."""
        return self.unshared * self.forward

    @property
    def backward_unshared(self) -> float:
        """Work of a backward pass that each tensor rank does whole."""
        return self.unshared * self.backward

    def in_context(self, ranks: int, way: Way) -> "LayerCost":
        """The layer where ``ranks`` share the positions, as if each did its part of all."""
        unshared, further = self.among_positions.get(way, (0.0, 0.0))
        factor = 1 + (ranks - 1) * unshared
        # By Ulysses, ranks see all keys at once.
        turns = min(1, ranks - 1) if way == "ulysses" else ranks - 1
        return replace(
            self,
            forward=self.forward * factor,
            backward=self.backward * factor,
            fixed=self.fixed + turns * further,
        )

    def in_rows(self, ranks: int) -> "LayerCost":
        """The layer where ``ranks`` share the rows of images, as if each did its part of all."""
        more = ranks - 1.0
        factor = 1 + more * self.behind
        return replace(
            self,
            forward=self.forward * factor,
            backward=self.backward * factor,
            kept=self.kept + more * self.kept_behind,
            outputs=self.outputs + more * self.outputs_behind,
            summed=tuple(numbers * factor for numbers in self.summed),
            keys=self.told,
        )


def layer_costs(model: SequentialModel, shape: Shape) -> list[LayerCost]:
    """Costs of the layers of a model for a sample of ``shape``, in operations.

    A multiplication and an addition are two operations; other work than matrix products is not
    counted.  A backward pass is two forward passes.
    """
    found = []
    for name, layer in model.layers.items():
        work, kept, kept_shared, rows, keys, scores = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        summed: list[float] = []
        behind, kept_behind, told = 0.0, 0.0, 0.0
        for leaf, own, inside in _leaves(layer, shape):
            flops, numbers = _leaf(leaf, own)
            work += flops
            if len(own) == 3:
                told += _told(leaf, own)
            else:
                behind, kept_behind = behind + flops, kept_behind + numbers
            if inside:
                kept_shared += numbers
            else:
                kept += numbers
            if isinstance(leaf, Enter | Leave):
                summed.append(prod(leaf.output_shape(own)))
            if isinstance(leaf, Unembedding):  # the loss sums maxima, exponentials and own scores
                labels = prod(own[:-1])
                summed += [labels, 2 * labels]
            if isinstance(leaf, nn.Attention):
                keys += 2 * prod(leaf.output_shape(own))
                scores += _scores(leaf, own)
        for part in _parts(layer):
            if isinstance(part, nn.Experts):
                rows += 2 * part.routing.top * prod(part.output_shape(shape))
            elif part.spread:
                rows += prod(part.output_shape(shape))
        shape = layer.output_shape(shape)
        counts = parameter_counts(layer)
        found.append(
            LayerCost(
                name,
                work,
                2 * work,
                kept,
                kept_shared,
                prod(shape),
                counts["parameters"],
                tuple(summed),
                counts["placed"],
                counts["tied"],
                rows=rows,
                keys=keys,
                scores=scores,
                behind=behind / work if work else 0.0,
                kept_behind=kept_behind,
                outputs_behind=0.0 if len(shape) == 3 else prod(shape),
                told=told,
            )
        )
    return found


def parameter_counts(layer: nn.Layer) -> dict[str, float]:
    """Numbers of a layer's parameters, and those of them that are placed or tied."""
    shapes = {own: prod(shape) for own, shape in layer.shapes().items()}
    lone = {*layer.placed, *layer.spread}
    return {
        "parameters": sum(count for own, count in shapes.items() if own not in layer.tied),
        "placed": sum(count for own, count in shapes.items() if own in lone),
        "tied": sum(count for own, count in shapes.items() if own in layer.tied),
    }


def _parts(layer: nn.Layer) -> Iterator[nn.Layer]:
    """Mixtures of experts, and layers that are made of no others."""
    if isinstance(layer, nn.Chain) and not isinstance(layer, nn.Experts):
        for part in layer.layers.values():
            yield from _parts(part)
    else:
        yield layer


def _leaves(
    layer: nn.Layer, shape: Shape, *, inside: bool = False
) -> Iterator[tuple[nn.Layer, Shape, bool]]:
    """Layers that are made of no others, the shape that each reads, whether ranks share that."""
    if not isinstance(layer, nn.Chain):
        yield layer, shape, inside
        return
    if isinstance(layer, nn.Experts):  # each has its share of the rows, if choices are even
        *experts, router = layer.layers.values()
        yield router, shape, inside
        rows = shape[0] * layer.routing.top / len(experts)
        for one in experts:
            yield from _leaves(one, (rows, *shape[1:]), inside=inside)  # type: ignore[arg-type]
        return
    for part in layer.layers.values():
        yield from _leaves(part, shape, inside=inside)
        if not isinstance(layer, nn.Residual):  # all branches of a residual read the same input
            inside = isinstance(part, Enter) or (inside and not isinstance(part, Leave))
            shape = part.output_shape(shape)


def _leaf(layer: nn.Layer, shape: Shape) -> tuple[float, float]:
    """Operations forward, and numbers kept for the backward pass."""
    read, written = prod(shape), prod(layer.output_shape(shape))
    match layer:
        case nn.Linear():
            return 2.0 * written * layer.inputs, read
        case nn.Conv2d():
            patch = layer.size**2 * layer.channels
            return 2.0 * written * patch, written / layer.outputs * patch
        case Unembedding():
            return 2.0 * written * layer.width, read
        case nn.CausalAttention():
            positions, width = layer.output_shape(shape)
            return 4.0 * positions**2 * width, read
        case nn.GELU():
            return 0.0, 2.0 * read  # its input, and the tanh of it
        case Enter() | Leave() | nn.Bias() | PositionEmbedding():
            return 0.0, 0.0
        case _:
            return 0.0, read


def _told(layer: nn.Layer, shape: Shape) -> float:
    """Numbers that ranks which share the rows of an image tell one another, forward or backward."""
    rows, columns, channels = shape
    match layer:
        case nn.Conv2d() | nn.MaxPool2d() | nn.AveragePool2d():
            return float(max(0, layer.size - layer.stride) * columns * channels)
        case nn.GroupNorm():
            return 4.0 * channels / layer.width
        case nn.GlobalAveragePool():
            return 2.0 * channels
        case nn.Flatten():
            return float(rows * columns * channels)
        case _:
            return 0.0


def _scores(layer: nn.Attention, shape: Shape) -> float:
    """Numbers of the scores that a sample's attention keeps."""
    positions, width = layer.output_shape(shape)
    kept = isinstance(layer, nn.CausalAttention) and positions <= TILE
    return positions**2 * width / layer.head_width if kept else 0.0
