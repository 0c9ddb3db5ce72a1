"""Check that nothing trained is in a graph of torch but what the trainer differentiates it by."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mpitrain.adapters.torch.checks.probe import Tensors, is_due

#: Names of a module's trained parameters, by their identity.
Trained = Mapping[int, str]


class Leaves:
    """Watches what the passes of a part follow from.

    A graph is walked in the first, second, fourth, eighth pass, and whenever its number of
    operations is a new one.  A walk costs about a microsecond for each operation, other passes cost
    two operations.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self._passes, self._sizes = 0, set[int]()
        self._leaf = torch.empty(0, requires_grad=True)

    def begin(self, parameters: Tensors, prefix: str, inputs: Tensors, name: str) -> int:
        """Begin a pass by these tensors; returns the number of operations before it."""
        for own, one in parameters.items():
            vars(one)["trained_as"] = f"{prefix}{own}"
        for one in inputs.values():
            vars(one)["trained_as"] = f"the input of {name}"
        return self._operations()

    def stray(self, outputs: Tensors, own: Iterable[torch.Tensor], before: int) -> str:
        """As :func:`stray`, for a pass that began after ``before`` operations."""
        self._passes += 1
        size = self._operations() - before
        if size in self._sizes and not is_due(self._passes):
            return ""
        self._sizes.add(size)
        return stray(outputs.values(), own, self.trained)

    def _operations(self) -> int:
        """Number of the operations of this thread so far that have a gradient."""
        node: Any = self._leaf.neg().grad_fn
        return node._sequence_nr() if node else 0


def stray(roots: Iterable[torch.Tensor], own: Iterable[torch.Tensor], trained: Trained) -> str:
    """What the roots follow from that is trained and none of ``own``: its name, or ""."""
    known = set(map(id, own))
    for leaf in leaves(roots):
        name: str = getattr(leaf, "trained_as", "") or trained.get(id(leaf), "")
        if name and id(leaf) not in known:
            return name
    return ""


def leaves(roots: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves of a graph that need a gradient."""
    graded = [root for root in roots if root.requires_grad]
    yield from (root for root in graded if root.is_leaf)
    found: list[torch.autograd.graph.Node] = [r.grad_fn for r in graded if r.grad_fn is not None]
    seen = set(found)
    for node in found:  # which grows
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                found.append(below)
