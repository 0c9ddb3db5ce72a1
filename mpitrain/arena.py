"""All parameters in one array and all gradients in another, with a view for each tensor.

The optimiser and the hash then see one array, and a bucket of gradients is a slice that never
moves, so that its all-reduce is bound once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpitrain.nn import Array, Parameters, array_namespace


@dataclass(frozen=True)
class Bucket:
    """Elements ``start <= i < stop`` of the gradients, those of some consecutive layers.

    Attributes:
        start, stop: element indices.
        first_layer: the lowest of its layers; its gradients are the last to be written.
    """

    start: int
    stop: int
    first_layer: int


class Arena:
    """Flat ``parameters`` and ``gradients`` of a chain of layers, in the order of the layers.

    Attributes:
        parameters: one-dimensional; updated in place, never replaced.
        gradients: the same size and type; zero at first.
        parameter_views: for each layer, its parameters by name, as views into ``parameters``.
        gradient_views: the same for ``gradients``.
    """

    def __init__(
        self, initial: Sequence[Parameters], empty: Callable[..., Array] | None = None
    ) -> None:
        """Copy the initial values; ``ValueError`` if there is no parameter in any layer.

        Args:
            empty: ``empty(size, dtype)`` makes the gradients' array; ``Communicator.empty`` puts it
                where the ranks of a node reduce it without messages.
        """
        tensors = [tensor.ravel() for layer in initial for tensor in layer.values()]
        if not tensors:
            raise ValueError("a model without parameters cannot be trained")
        xp = array_namespace(tensors[0])
        self.parameters: Array = xp.concatenate(tensors)
        self.gradients: Array = (empty or xp.empty)(self.parameters.size, self.parameters.dtype)
        self.gradients[...] = 0
        self._ends = _layer_ends(initial)
        self.parameter_views = _views(self.parameters, initial)
        self.gradient_views = _views(self.gradients, initial)

    def store(self, layer: int, gradients: Mapping[str, Array]) -> None:
        """Copy the gradients of ``layer``, which must have those of all its parameters."""
        for name, view in self.gradient_views[layer].items():
            view[...] = gradients[name]

    def buckets(self, minimum_bytes: int) -> list[Bucket]:
        """Cut the gradients into buckets in the order in which a backward pass writes them.

        Each holds whole layers and at least ``minimum_bytes`` bytes, but for the last one.
        """
        buckets = []
        stop = self.gradients.size
        for layer in reversed(range(len(self._ends))):
            start = self._ends[layer - 1] if layer else 0
            size = (stop - start) * self.gradients.itemsize
            if stop > start and (start == 0 or size >= minimum_bytes):
                buckets.append(Bucket(start, stop, layer))
                stop = start
        return buckets


def _layer_ends(initial: Sequence[Parameters]) -> list[int]:
    ends, end = [], 0
    for layer in initial:
        end += sum(tensor.size for tensor in layer.values())
        ends.append(end)
    return ends


def _views(flat: Array, initial: Sequence[Parameters]) -> list[dict[str, Array]]:
    views: list[dict[str, Array]] = []
    start = 0
    for layer in initial:
        views.append({})
        for name, tensor in layer.items():
            views[-1][name] = flat[start : start + tensor.size].reshape(tensor.shape)
            start += tensor.size
    return views
