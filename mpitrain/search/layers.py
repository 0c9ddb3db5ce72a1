"""Work and memory of a model's layers, from their shapes alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from mpitrain import nn
from mpitrain.arrays import Shape
from mpitrain.models import SequentialModel
from mpitrain.nn.embedding import PositionEmbedding, Unembedding
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
        summed: numbers of the all-reduces over the tensor ranks, forward and backward.
    """

    name: str
    forward: float
    backward: float
    kept: float
    kept_shared: float
    outputs: float
    parameters: float
    summed: tuple[float, ...] = ()


def layer_costs(model: SequentialModel, shape: Shape) -> list[LayerCost]:
    """Costs of the layers of a model for a sample of ``shape``, in operations.

    A multiplication and an addition are two operations; other work than matrix products is not
    counted.  A backward pass is two forward passes.
    """
    found = []
    for name, layer in model.layers.items():
        work, kept, kept_shared = 0.0, 0.0, 0.0
        summed: list[float] = []
        for leaf, own, inside in _leaves(layer, shape):
            flops, numbers = _leaf(leaf, own)
            work += flops
            if inside:
                kept_shared += numbers
            else:
                kept += numbers
            if isinstance(leaf, Enter | Leave):
                summed.append(prod(leaf.output_shape(own)))
        parameters = sum(
            prod(size) for own, size in layer.shapes().items() if own not in layer.tied
        )
        shape = layer.output_shape(shape)
        found.append(
            LayerCost(
                name, work, 2 * work, kept, kept_shared, prod(shape), parameters, tuple(summed)
            )
        )
    return found


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
            scores = positions**2 * width / layer.head_width
            return 4.0 * positions**2 * width, read + scores
        case nn.GELU():
            return 0.0, 2.0 * read  # its input, and the tanh of it
        case Enter() | Leave() | nn.Bias() | PositionEmbedding():
            return 0.0, 0.0
        case _:
            return 0.0, read
