"""The two sides that are compared: a loop of plain torch, and the trainer's own layers."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mpitrain.adapters.torch.arrays import (
    as_array,
    as_tensor,
    as_tensors,
    tensors_of,
)
from mpitrain.adapters.torch.checks.module_class import is_held
from mpitrain.adapters.torch.checks.probe import Tensors, arguments, options, outputs_of
from mpitrain.adapters.torch.functions.objective import TorchLoss
from mpitrain.adapters.torch.modules.drawing import Drawing
from mpitrain.adapters.torch.modules.draws import DrawPlace, Draws, Where
from mpitrain.adapters.torch.modules.layer import TorchLayer
from mpitrain.adapters.torch.modules.stand_ins import stand_ins
from mpitrain.adapters.torch.modules.whole import trained
from mpitrain.adapters.torch.shadow.differences import Passed
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.data import Samples
from mpitrain.fields import as_given, fields, joined
from mpitrain.nn.context import Context
from mpitrain.nn.layer import go_forward
from mpitrain.objective import LossFunction, reduction_of
from mpitrain.optim.groups import Grouping
from mpitrain.optim.optimizers import State


class Plain:
    """The program's module in a loop of plain torch, with tensors and attributes of its own.

    Attributes:
        optimizer: the program's; None: it has none of torch.
    """

    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, module: torch.nn.Module, layers: Mapping[str, Any], dtype: str) -> None:
        """``layers``: the trainer's, which have the names."""
        one = next(iter(layers.values()))
        self._form = as_given if one.prefix else None
        self.kind, self._types, self.module = getattr(torch, dtype), one.keeps_types, module
        self._parts = list(module.modules())
        # Functions may hold on to the parts, which therefore stay the same.
        memo: dict[int, Any] = {id(part): part for part in self._parts}
        self._own = deepcopy([vars(part) for part in self._parts], memo)
        self._draws = Draws(module)
        self._scheduler: Any = None
        with self.there():
            held = [part for part in self._parts if is_held(part, module.training)]
            module.train()
            for part in held:
                part.training = False
            if not self._types:
                module.to(self.kind)
            self.parameters = trained(module, layers)
        if any(p.dtype != self.kind for p in self.parameters.values()):
            raise TypeError("trained parameters are of several types")

    @contextmanager
    def there(self) -> Iterator[None]:
        """The module has this side's tensors and attributes, and its memory these values."""
        given, before = list(self.module.parameters()), [dict(vars(part)) for part in self._parts]
        _become(self._parts, self._own)
        values = [p.detach().clone() for p in given]
        for p, own in zip(given, self.module.parameters(), strict=True):
            p.data.copy_(own.detach())
        try:
            yield
        finally:
            self._own = [dict(vars(part)) for part in self._parts]
            _become(self._parts, before)
            for p, value in zip(given, values, strict=True):
                p.data.copy_(value)

    def optimise(self, factory: Any, schedule: Any) -> None:
        """Make the program's optimiser and scheduler; TypeError: it is of other parameters."""
        if factory is None:
            return
        own = list(self.parameters.values())
        self.optimizer = factory(own)
        given = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if given != set(map(id, own)):
            raise TypeError("the optimizer is not made of the parameters that its function gets")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                made = schedule(self.optimizer) if schedule else None
            except Exception:  # a function of a step
                made = None
        if isinstance(made, LRScheduler) and not isinstance(made, ReduceLROnPlateau):
            self._scheduler = made

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters."""
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def become(self, values: Tensors, *, moved: bool = False) -> None:
        """Take these values; with ``moved``, each a little larger."""
        for name, p in self.parameters.items():
            p.copy_(_moved(values[name]) if moved else values[name])

    def take(
        self, samples: Samples, loss: LossFunction, source: "Keyed", *, moved: bool = False
    ) -> Passed:
        """Loss, gradients and outputs of some samples, with ``moved`` inputs."""
        kinds = {self.kind}

        def saved(one: torch.Tensor) -> torch.Tensor:
            if one.is_floating_point():
                kinds.add(one.dtype)
            return one

        x = tensors_of(fields(samples.inputs), self.kind, every=self._types)
        if moved:
            x = {name: _moved(part) for name, part in x.items()}
        args, kwargs = arguments(x, options(self.module), self._form)
        drawn = source(self._draws)
        with drawn, torch.autograd.graph.saved_tensors_hooks(saved, lambda one: one):
            raw = self.module(*args, **kwargs)
            total, value = _loss_of(loss, raw, samples.labels)
        own = list(self.parameters.values())
        with drawn.again() if isinstance(drawn, Drawing) else nullcontext():
            by = torch.autograd.grad(total, own, allow_unused=True)
        gradients = dict(zip(self.parameters, by, strict=True))
        outputs = {n: p.detach() for n, p in outputs_of(raw)[0].items() if p.dim()}
        narrow = max(kinds, key=lambda kind: torch.finfo(kind).eps)
        return Passed(float(value.detach()), gradients, outputs, narrow)

    def step(
        self, gradients: Mapping[str, Any], optim: Any, rates: Mapping[int, float]
    ) -> dict[str, Any]:
        """Update by these gradients, clipped; gives them as the optimiser had them.

        ``rates``: the trainer's rate of each group, if the program has no scheduler.
        """
        for name, p in self.parameters.items():
            p.grad = None if gradients[name] is None else gradients[name].clone()
        if optim.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), optim.clip_norm)
        if optim.clip_value:
            torch.nn.utils.clip_grad_value_(self.parameters.values(), optim.clip_value)
        found = {n: None if p.grad is None else p.grad.clone() for n, p in self.parameters.items()}
        if self.optimizer is not None:
            for number, rate in {} if self._scheduler else rates.items():
                self.optimizer.param_groups[number]["lr"] = rate
            self.optimizer.step()
        return found

    def end_of_row(self) -> None:
        """Let the scheduler take a step."""
        if self._scheduler:
            self._scheduler.step()


class Ours:
    """Copies of the trainer's layers, on one rank.

    They call the program's own modules, whose attributes are as before after each pass.

    Attributes:
        layers: the layers.
        loss: the loss.
        values: the parameters by name.
    """

    def __init__(
        self, module: torch.nn.Module, layers: Mapping[str, TorchLayer], loss: Any, dtype: str
    ) -> None:
        self._parts = list(module.modules())
        inner = [part for layer in layers.values() for part in layer.module.modules()]
        shared = [np, *self._parts, *inner, getattr(loss, "function", None)]
        memo: dict[int, Any] = {id(one): one for one in shared}
        layers, self.loss = deepcopy((layers, loss), memo)
        for verdict in (one for layer in layers.values() for one in layer.verdicts()):
            verdict.deferred = False
        self.layers, self.values = layers, dict[str, torch.Tensor]()
        self.names = {
            f"{name}.{own}": layer.prefix + own
            for name, layer in layers.items()
            for own in layer.shapes()
            if own not in layer.tied
        }
        self._state = {
            f"{name}.{own}": values
            for name, layer in layers.items()
            for own, values in layer.state(dtype).items()
        }
        self._dtype = np.dtype(dtype)
        self._mixes = any(True for layer in layers.values() for _ in stand_ins(layer.module))
        self._slots: dict[str, State] = {}
        self._taken: dict[str, int] = {}

    def cuts(self, count: int) -> list[slice]:
        """Micro-batches of unequal sizes; a single one where batch norm goes by all samples."""
        if self._mixes or count < 2:
            return [slice(count)]
        return [slice(1), slice(1, count)]

    def take(self, samples: Samples, context: Context, *, moved: bool = False) -> Passed:
        """Loss, gradients and outputs; each layer takes all micro-batches before the next does."""
        before = [dict(vars(part)) for part in self._parts]
        try:
            return self._take(samples, context, moved)
        finally:
            _become(self._parts, before)

    def _take(self, samples: Samples, context: Context, moved: bool) -> Passed:
        loss, inputs, labels, count = self.loss, samples.inputs, samples.labels, len(samples)
        if moved:
            inputs = joined({n: as_array(_moved(p)) for n, p in as_tensors(fields(inputs)).items()})
        cuts, state = (
            self.cuts(count),
            {n: a.copy() for n, a in self._state.items()} if moved else self._state,
        )
        contexts = [replace(context, samples=context.samples[rows], state=state) for rows in cuts]
        values = {name: as_array(value) for name, value in self.values.items()}
        xs, passes = [inputs[rows] for rows in cuts], []
        for name, layer in self.layers.items():
            own = {n: values[layer.tied.get(n) or f"{name}.{n}"] for n in layer.shapes()}
            every = [go_forward(layer, name, own, x, c) for x, c in zip(xs, contexts)]
            xs = [y for y, _ in every]
            passes.append((name, layer, own, [saved for _, saved in every]))
        divisor = 1.0 if reduction_of(loss) == "sum" else float(labels.size)
        parts = [loss(y, labels[rows], divisor) for y, rows in zip(xs, cuts)]
        fault = getattr(loss, "fault", None)
        if fault is not None:
            raise ConfigError(str(fault))
        times = divisor / float(sum(rest[0] for _, _, *rest in parts)) if len(parts[0]) > 2 else 1.0
        gradients: dict[str, Any] = dict.fromkeys(self.names)
        dys = [dy for _, dy, *_ in parts]
        for name, layer, own, saved in reversed(passes):
            for n, memory in enumerate(saved):
                dys[n], kept = layer.backward(own, memory, dys[n])
                for inner, one in layer.gradients(own, kept).items():
                    full = layer.tied.get(inner) or f"{name}.{inner}"
                    if one is not None:
                        now, one = gradients[full], as_tensor(one) * times
                        gradients[full] = one.clone() if now is None else now + one
        outputs = as_tensors(fields(np.concatenate(xs)))
        value = float(sum(one for one, *_ in parts)) * times
        return Passed(value, gradients, outputs)

    def told(self, count: int) -> str:
        """Sizes of the micro-batches."""
        return " and ".join(str(cut.stop - (cut.start or 0)) for cut in self.cuts(count))

    @property
    def draws(self) -> bool:
        """Whether a layer draws random numbers in training."""
        return any(layer.draws for layer in self.layers.values())

    def drawn(self, context: Context) -> "Keyed":
        """The source that gives the whole module the numbers of the latest pass."""
        where = {}
        for layer in self.layers.values():
            for place, own in layer.drawn():
                name = ".".join(filter(None, (layer.prefix.rstrip("."), place.name)))
                where[DrawPlace(True, (), name, place.turn)] = own
        return Keyed(context, where) if self.draws else Keyed(None, {})

    def step(
        self, gradients: Mapping[str, Any], grouping: Grouping, step: int, rate: float
    ) -> None:
        """Update copies of the parameters, each as a whole or in two pieces, as ranks have them."""
        self.values = {name: value.clone() for name, value in self.values.items()}
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            group = grouping(name).at(step)
            own = group.optimizer
            p, g = as_array(self.values[name]), as_array(gradient)
            if name not in self._slots:
                self._slots[name] = {slot: np.zeros(p.size, p.dtype) for slot in own.slots}
            self._taken[name] = number = self._taken.get(name, 0) + 1
            third, flat = p.size // 3, own.whole
            for piece in (slice(None),) if flat else (slice(third), slice(third, None)):
                shape = p.shape if flat else (-1,)
                state = {slot: values[piece] for slot, values in self._slots[name].items()}
                a, b = (one.reshape(-1)[piece].reshape(shape) for one in (p, g))
                own.take_step(a, b, state, number, rate * group.rate, 1.0)


class Keyed:
    """Makes the contexts in which a whole module draws the numbers that its layers have drawn."""

    def __init__(self, context: Context | None, where: Mapping[DrawPlace, Where]) -> None:
        self._context, self._where = context, where

    def __call__(self, draws: Draws) -> AbstractContextManager[Any]:
        if self._context is None:
            return nullcontext()
        draws.where = dict(self._where)
        return Drawing(draws, self._context, np, ())


def _become(parts: Sequence[torch.nn.Module], attributes: Sequence[Mapping[str, Any]]) -> None:
    """Give parts of a module these attributes, and no others."""
    for part, own in zip(parts, attributes, strict=True):
        vars(part).clear()
        vars(part).update(own)


def _moved(values: torch.Tensor) -> torch.Tensor:
    """Numbers moved by one unit in their last place."""
    if not values.is_floating_point():
        return values
    return torch.nextafter(values, torch.full_like(values, torch.inf))


def _loss_of(loss: LossFunction, raw: Any, labels: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor with the loss's gradients, and the loss, as in one process."""
    outputs, form = outputs_of(raw)
    if isinstance(loss, TorchLoss):
        total = loss.plain(form(outputs), outputs, as_tensors(fields(labels)))
        return total, total
    divisor = 1.0 if reduction_of(loss) == "sum" else float(labels.size)
    arrays = {name: as_array(part) for name, part in outputs.items()}
    value, by, *counted = loss(joined(arrays), labels, divisor)
    times = divisor / float(counted[0]) if counted else 1.0
    parts = [
        (outputs[n] * as_tensor(dy).to(outputs[n]) * times).sum() for n, dy in fields(by).items()
    ]
    return torch.stack(parts).sum(), torch.tensor(float(value) * times, dtype=torch.float64)
