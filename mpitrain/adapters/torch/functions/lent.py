"""Parameters in graphs of torch: those that a loss reads, and what nobody differentiates by."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mpitrain.adapters.torch.checks.probe import Tensors, having
from mpitrain.arrays import Shape

_NAME = "{} of the loss"


class Lent:
    """Parameters that the last layer holds for the loss: other layers', and some of its own.

    They are tied to those that are trained, so that each layout brings their values to the loss and
    adds up their gradients.

    Attributes:
        trained: names of the module's parameters, by identity.
        moving: identities of its constants that change in training.
        names: names in the last layer, by names in the module.
        shapes, tied: shapes and full names of other layers' parameters, by names in the last layer.
        values: the parameters of the latest pass that the loss reads.
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        """Nothing is read yet; ``layers`` are those of a module, or none."""
        self._layers, self._trains, self.names = layers, False, dict[str, str]()
        first: Any = next(iter(layers.values()), None)
        self.trained: Mapping[int, str] = first.trained_names if first else {}
        self.moving: Any = first.moving if first else frozenset()
        self._gradients = dict[str, torch.Tensor]()
        self.shapes, self.tied = dict[str, Shape](), dict[str, str]()
        self.values: Tensors = {}

    def learn(self, total: torch.Tensor) -> None:
        """Let the last layer hold what a loss follows from, on all ranks.

        Raises:
            ValueError: ranks share parts, whose parameters do not lie where the loss is taken.
        """
        names = {name for leaf in leaves([total]) if (name := self.trained.get(id(leaf)))}
        if not names:
            return
        layers = [*self._layers.values()]
        self._module, last = layers[0].whole, layers[-1]
        if any(layer.plan.splits for layer in layers):
            raise ValueError(
                f"it reads {min(names)} of a model that splits= share among ranks; "
                "return it from the module as an output, with a row for each sample"
            )
        every = dict(self._module.named_parameters(remove_duplicate=False))
        for name, layer in self._layers.items():
            for own in layer.shapes().keys() - layer.tied.keys():
                full = self.trained[id(every[layer.prefix + own])]
                if full in names and layer is last:
                    self.names[full] = own
                elif full in names:
                    there = self.names[full] = _NAME.format(full)
                    self.tied[there], self.shapes[there] = f"{name}.{own}", layer.shapes()[own]
        last.lent, last.tied = self, {**last.tied, **self.tied}

    def take(self, given: Tensors, *, training: bool) -> dict[str, torch.Tensor]:
        """The layer's own ones of the parameters of a pass; the loss has the others."""
        self.values = {_NAME.format(full): given[own] for full, own in self.names.items()}
        self._trains = training
        return {name: one for name, one in given.items() if name not in self.tied}

    def there(self) -> AbstractContextManager[None]:
        """The program's module has the values of the latest pass within this block."""
        if not self.values:
            return nullcontext()
        return having(self._module, {n.removesuffix(_NAME[2:]): p for n, p in self.values.items()})

    def add(self, gradients: Tensors, weight: float) -> None:
        """Add the gradients of a micro-batch's loss, if it trains."""
        for full, own in self.names.items() if self._trains else ():
            if (one := gradients.get(_NAME.format(full))) is not None:
                self._gradients[own] = self._gradients.get(own, 0) + (one * weight).to(one.dtype)

    def give(self, kept: dict[str, Any]) -> dict[str, Any]:
        """The last layer's gradients, with the sums of the loss's since the last call."""
        more, self._gradients = self._gradients, {}
        found: dict[str, Any] = dict.fromkeys(self.shapes) | kept
        return found | {n: g if found[n] is None else found[n] + g for n, g in more.items()}


def mark(known: Tensors) -> None:
    """Let :func:`stray` name these tensors, where they are leaves behind others' outputs."""
    for name, one in known.items():
        vars(one)["trained_as"] = name


def stray(roots: Tensors, known: Tensors, trained: Mapping[int, str]) -> str:
    """Name of a trained leaf behind the roots that is not known, or "".

    Leaves have the names of ``trained``, by identity, or one that a layer gave them.  The walk
    costs a microsecond an operation.
    """
    ids = set(map(id, known.values()))
    for leaf in leaves(roots.values()):
        name: str = getattr(leaf, "trained_as", "") or trained.get(id(leaf), "")
        if name and id(leaf) not in ids:
            return name
    return ""


def gradients(total: torch.Tensor, outputs: Tensors) -> dict[str, torch.Tensor]:
    """Gradients of a loss by those outputs that it depends on."""
    by = {name: part for name, part in outputs.items() if part.requires_grad}
    found = torch.autograd.grad(total, list(by.values()), allow_unused=True)
    return {name: one for name, one in zip(by, found, strict=True) if one is not None}


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
