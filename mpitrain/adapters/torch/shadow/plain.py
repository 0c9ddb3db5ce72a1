"""The program's module in a loop of plain torch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from math import prod
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from mpitrain.adapters.torch.arrays import (
    as_array,
    as_tensor,
    as_tensors,
    copied,
    named_tensors,
    tensors_of,
)
from mpitrain.adapters.torch.checks.module_class import become, is_held
from mpitrain.adapters.torch.checks.probe import Tensors, arguments, backward, options, outputs_of
from mpitrain.adapters.torch.functions.objective import TorchLoss
from mpitrain.adapters.torch.modules.drawing import Drawing
from mpitrain.adapters.torch.modules.draws import Draws
from mpitrain.adapters.torch.modules.whole import trained
from mpitrain.adapters.torch.shadow.differences import Passed, nudged
from mpitrain.adapters.torch.shadow.ours import Source, judged
from mpitrain.arrays import Array
from mpitrain.data import Samples
from mpitrain.fields import as_given, fields, joined
from mpitrain.objective import LossFunction


class Plain:
    """The program's module in a loop of plain torch, with tensors and attributes of its own.

    Attributes:
        module: the module.
        parameters: the trained parameters by their names in the trainer.
        optimizer, scheduler: the program's; None: it has none of torch.
        held: bytes of the results from which the latest loss follows.
    """

    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    held = 0

    def __init__(self, module: torch.nn.Module, layers: Mapping[str, Any], dtype: str) -> None:
        """``layers``: the trainer's, which have the names."""
        one = next(iter(layers.values()))
        self._form = as_given if one.prefix else None
        self._kind, self._types, self.module = getattr(torch, dtype), one.keeps_types, module
        self._parts = list(module.modules())
        # Functions may hold on to the parts, which therefore stay the same.
        memo: dict[int, Any] = {id(part): part for part in self._parts}
        own = [vars(part) for part in self._parts]
        self._own = copied(own, memo)
        self._draws, self._first = Draws(module), 0.0
        with self.there():
            held = [part for part in self._parts if is_held(part, module.training)]
            module.train()
            for part in held:
                part.training = False
            if not self._types:
                module.to(self._kind)
            self.parameters = trained(module, layers)
        if any(p.dtype != self._kind for p in self.parameters.values()):
            raise TypeError("trained parameters are of several types")

    @contextmanager
    def there(self) -> Iterator[None]:
        """The module has this side's tensors and attributes, and its memory these values."""
        given, before = list(self.module.parameters()), [dict(vars(part)) for part in self._parts]
        become(self._parts, self._own)
        values = [p.detach().clone() for p in given]
        for p, own in zip(given, self.module.parameters(), strict=True):
            p.data.copy_(own.detach())
        try:
            yield
        finally:
            self._own = [dict(vars(part)) for part in self._parts]
            become(self._parts, before)
            for p, value in zip(given, values, strict=True):
                p.data.copy_(value)

    def follow(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Take copies of attributes that the program has set, by the names of the parts."""
        for (name, _), own in zip(self.module.named_modules(), self._own, strict=True):
            own.update(deepcopy(changed.get(name, {})))

    def optimise(self, factory: Any, schedule: Any) -> None:
        """Make the program's optimiser, and its scheduler if there is one; TypeError: it is of
        other parameters."""
        own = list(self.parameters.values())
        self.optimizer = made = factory(own)
        if {id(p) for group in made.param_groups for p in group["params"]} != set(map(id, own)):
            raise TypeError("the optimizer is not made of the parameters that its function gets")
        self._first = float(made.param_groups[0]["lr"])
        self.scheduler = schedule and schedule(made)

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters."""
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def become(self, values: Tensors, *, moved: bool = False) -> None:
        """Take these values; with ``moved``, each a little larger."""
        for name, p in self.parameters.items():
            p.copy_(nudged(values[name]) if moved else values[name])

    def compute(
        self,
        samples: Samples,
        loss: LossFunction,
        source: Source | None,
        names: Mapping[str, str],
        *,
        moved: bool = False,
    ) -> Passed:
        """Loss, gradients, outputs and state of some samples, with ``moved`` inputs.

        ``source`` gives the module random numbers; ``names``: names of the state in the module, by
        those in the trainer.
        """
        x = tensors_of(fields(samples.inputs), self._kind, every=self._types)
        if moved:
            x = {name: nudged(part) for name, part in x.items()}
        args, kwargs = arguments(x, options(self.module), self._form)
        drawn = source(self._draws) if source else nullcontext()
        with drawn:
            raw = self.module(*args, **kwargs)
            total, mean = _loss_of(loss, raw, samples.labels)
        every = named_tensors(self.module, every=True)
        state = {name: every[own].detach().clone() for name, own in names.items()}
        own, results = list(self.parameters.values()), _Results(self._kind)
        results.follow(total)
        repeated = saved_tensors_hooks(results.note, lambda one: one)  # as a checkpoint's
        with drawn.again() if isinstance(drawn, Drawing) else nullcontext(), repeated:
            by = backward([total], [torch.ones_like(total)], own)
        for name, value in state.items():  # what is computed again has counted
            every[names[name]].data.copy_(value)
        gradients = dict(zip(self.parameters, by, strict=True))
        outputs = {n: p.detach() for n, p in outputs_of(raw)[0].items() if p.dim()}
        self.held, narrow = results.nbytes, results.narrow
        return Passed(float(mean.detach()), gradients, outputs, state, narrow=narrow)

    def step(
        self, gradients: Mapping[str, Any], optim: Any, rates: Mapping[int, float], first: float
    ) -> dict[str, Any]:
        """Update by these gradients, clipped; gives them as the optimiser had them.

        ``rates``: the trainer's, of each group, if the program has no scheduler; ``first``: the
        rate with which it begins in the place of the optimiser's.
        """
        for name, p in self.parameters.items():
            p.grad = None if gradients[name] is None else gradients[name].clone()
        if optim.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), optim.clip_norm)
        if optim.clip_value:
            torch.nn.utils.clip_grad_value_(self.parameters.values(), optim.clip_value)
        found = {n: None if p.grad is None else p.grad.clone() for n, p in self.parameters.items()}
        if self.optimizer is not None:
            groups = self.optimizer.param_groups
            own = [group["lr"] for group in groups]
            for number, group in enumerate(groups):
                scaled = own[number] * (first / self._first)
                group["lr"] = scaled if self.scheduler else rates.get(number, scaled)
            self.optimizer.step()
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate
        return found


class _Results:
    """Types and bytes of the results from which a loss follows.

    Attributes:
        narrow: the type with the fewest digits.
        nbytes: bytes of all.
    """

    def __init__(self, kind: torch.dtype) -> None:
        self.narrow, self.nbytes = kind, 0

    def follow(self, loss: torch.Tensor) -> None:
        """Note the results in the loss's graph, and what compiled code and functions with backward
        passes of their own keep."""
        nodes: list[Any] = [loss.grad_fn]
        seen = {None}
        while nodes:
            if (node := nodes.pop()) not in seen:
                seen.add(node)
                nodes += [one for one, _ in node.next_functions]
                for one in (*node._input_metadata, *getattr(node, "saved_tensors", ())):
                    self.note(one)

    def note(self, one: Any) -> Any:
        """Note a tensor, or one's type and shape."""
        if one is not None and one.dtype.is_floating_point:
            self.narrow = max(self.narrow, one.dtype, key=lambda kind: torch.finfo(kind).eps)
            self.nbytes += prod(one.shape) * one.dtype.itemsize
        return one


def _loss_of(loss: LossFunction, raw: Any, labels: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor with the loss's gradients, and the loss, as in one process."""
    outputs, form = outputs_of(raw)
    if isinstance(loss, TorchLoss):
        total = loss.plain(form(outputs), outputs, as_tensors(fields(labels)))
        return total, total
    arrays = {name: as_array(part) for name, part in outputs.items()}
    value, (by,), times = judged(loss, [joined(arrays)], [labels])
    parts = [
        (outputs[n] * as_tensor(dy).to(outputs[n]) * times).sum() for n, dy in fields(by).items()
    ]
    return torch.stack(parts).sum(), torch.tensor(value, dtype=torch.float64)
