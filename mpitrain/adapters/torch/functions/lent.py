"""Parameters of a program's module that its loss reads beside the outputs."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mpitrain.adapters.torch.checks.leaves import leaves
from mpitrain.adapters.torch.checks.probe import Tensors, having
from mpitrain.arrays import Shape


class Lent:
    """What the last layer holds for the loss: parameters of other layers, and some of its own.

    They are tied to those that are trained, so that each layout brings their values to the loss and
    adds up their gradients.

    Attributes:
        trained: names of the module's trained parameters, by identity.
        shapes, tied: shapes and full names of other layers' parameters, by names in the last layer.
        values: the parameters of the latest pass that the loss reads, by names in the last layer.
    """

    def __init__(self, module: torch.nn.Module | None, layers: Mapping[str, Any]) -> None:
        """Nothing is read yet; ``layers`` are those of the module."""
        self._module, self._layers = module, layers
        self._names: dict[str, str] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._trains = False
        every = module.named_parameters() if module else ()
        self.trained = {id(p): name for name, p in every if p.requires_grad}
        self.shapes: dict[str, Shape] = {}
        self.tied: dict[str, str] = {}
        self.values: Tensors = {}

    def learn(self, total: torch.Tensor) -> None:
        """Let the last layer hold what a loss follows from, on all ranks.

        Raises:
            ValueError: experts are shared, whose parameters do not lie where the loss is taken.
        """
        names = {name for leaf in leaves([total]) if (name := self.trained.get(id(leaf)))}
        if not names - set(self._names.values()):
            return
        if any(layer.experts for layer in self._layers.values()):
            raise ValueError(
                f"it reads {min(names)} of a model whose experts ranks share; return it from the "
                "module as an output, with a row for each sample"
            )
        *_, (last, holder) = self._layers.items()
        assert self._module is not None
        for name, layer in self._layers.items():
            for own in layer.shapes().keys() - layer.tied.keys():
                full = self.trained[id(self._module.get_parameter(f"{layer.prefix}{own}"))]
                if full in names and name == last:
                    self._names[own] = full
                elif full in names:
                    there = f"{full} of the loss"
                    self._names[there], self.tied[there] = full, f"{name}.{own}"
                    self.shapes[there] = layer.shapes()[own]
        holder.hold(self)

    def take(self, given: Tensors, *, training: bool) -> dict[str, torch.Tensor]:
        """The layer's own ones of the parameters of a pass; the loss has the others."""
        self.values, self._trains = {name: given[name] for name in self._names}, training
        return {name: one for name, one in given.items() if name not in self.tied}

    def there(self) -> AbstractContextManager[None]:
        """The program's module has the values of the latest pass within this block."""
        if self._module is None or not self.values:
            return nullcontext()
        return having(self._module, {self._names[n]: one for n, one in self.values.items()})

    def add(self, gradients: Tensors, weight: float) -> None:
        """Add the gradients of a micro-batch's loss, if it trains."""
        for name, one in gradients.items() if self._trains else ():
            before = self._gradients.get(name, 0)
            self._gradients[name] = before + (one * weight).to(one.dtype)

    def give(self, names: Collection[str]) -> dict[str, torch.Tensor | None]:
        """The sums of gradients since the last call, None for the others of these names."""
        found, self._gradients = self._gradients, {}
        return dict.fromkeys(names) | found
