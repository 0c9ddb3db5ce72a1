"""Check that nothing trained is in a graph of torch but what the trainer differentiates it by."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mpitrain.adapters.torch.checks.probe import Tensors, is_due


class Leaves:
    """Watches what the passes of a part follow from; ``trained``: names of parameters by identity.

    A graph is walked in the first, second, fourth, eighth pass, and whenever its number of
    operations is a new one.  That costs a microsecond an operation, another pass two operations.
    """

    def __init__(self, trained: Mapping[int, str]) -> None:
        self.trained = trained
        self._passes, self._sizes = 0, set[int]()
        self._leaf = torch.empty(0, requires_grad=True)

    def begin(self, known: Tensors) -> int:
        """Begin a pass by these tensors; returns the number of operations before it."""
        for name, one in known.items():
            vars(one)["trained_as"] = name
        return self._operations()

    def stray(self, outputs: Tensors, known: Tensors, before: int) -> str:
        """As :func:`stray`, for a pass that began after ``before`` operations."""
        self._passes += 1
        size = self._operations() - before
        if size in self._sizes and not is_due(self._passes):
            return ""
        self._sizes.add(size)
        return stray(outputs, known, self.trained)

    def _operations(self) -> int:
        """Number of the operations of this thread so far that have a gradient."""
        node: Any = self._leaf.neg().grad_fn
        return node._sequence_nr() if node else 0


def stray(roots: Tensors, known: Tensors, trained: Mapping[int, str]) -> str:
    """Name of a trained leaf behind the roots that is not known, or ""."""
    ids = set(map(id, known.values()))
    for leaf in leaves(roots.values()):
        name: str = getattr(leaf, "trained_as", "") or trained.get(id(leaf), "")
        if name and id(leaf) not in ids:
            return name
    return ""


def leaves(roots: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves of a graph that need a gradient."""
    graded = [root for root in roots if root.requires_grad]
    yield from (root for root in graded if root.is_leaf)
    for node in operations(graded):
        if is_leaf(node):
            yield node.variable  # type: ignore[attr-defined]


def operations(
    roots: Iterable[torch.Tensor], known: Iterable[torch.Tensor] = ()
) -> list[torch.autograd.graph.Node]:
    """The operations behind these tensors, but for those that are behind ``known`` ones alone."""
    ends = {one.grad_fn for one in known}
    found = [n for root in roots if (n := root.grad_fn) is not None and n not in ends]
    seen = set(found)
    for node in found:  # which grows
        for below, _ in node.next_functions:
            if below is not None and below not in seen and below not in ends:
                seen.add(below)
                found.append(below)
    return found


def is_leaf(node: torch.autograd.graph.Node) -> bool:
    """Whether an operation adds up a leaf's gradient."""
    return type(node).__name__ == "AccumulateGrad"
