"""The trainer's own layers, on one rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import count, pairwise
from math import nan
from typing import Any

import numpy as np
import torch

from mpitrain.adapters.torch.arrays import as_array, as_tensor, as_tensors
from mpitrain.adapters.torch.checks.module_class import untouched
from mpitrain.adapters.torch.checks.probe import Tensors
from mpitrain.adapters.torch.modules.drawing import Drawing
from mpitrain.adapters.torch.modules.draws import DrawPlace, Draws
from mpitrain.adapters.torch.modules.layer import TorchLayer
from mpitrain.adapters.torch.shadow.differences import Passed, nudged
from mpitrain.arrays import Array, Gradients
from mpitrain.config import ConfigError
from mpitrain.data import Samples
from mpitrain.fields import fields, joined
from mpitrain.nn.context import Context
from mpitrain.objective import reduction_of
from mpitrain.optim.groups import Grouping
from mpitrain.optim.optimizers import State
from mpitrain.pipeline.stage import Stage

#: Gives a module the random numbers of a pass.
Source = Callable[[Draws], Drawing]

_WHOLE = [slice(None)]


class Ours:
    """Copies of the trainer's layers, on one rank.

    They call the program's own modules, whose attributes are as before after each pass.

    Attributes:
        loss: the loss.
        values: the parameters by name.
        state: arrays besides them that training changes, by name.
    """

    def __init__(
        self, module: torch.nn.Module, layers: Mapping[str, TorchLayer], loss: Any, dtype: str
    ) -> None:
        self._modules = [module, *(layer.module for layer in layers.values())]
        inner = [part for layer in layers.values() for part in layer.module.modules()]
        shared = [np, *module.modules(), *inner, getattr(loss, "function", None)]
        memo: dict[int, Any] = {id(one): one for one in shared}
        layers, self.loss = deepcopy((layers, loss), memo)
        self._layers, self._stage = layers, Stage([*layers.values()], names=[*layers])
        for verdict in (one for layer in layers.values() for one in layer.verdicts()):
            verdict.deferred = False
        self.values: dict[str, torch.Tensor] = {}
        self.state = {
            f"{name}.{own}": values
            for name, layer in layers.items()
            for own, values in layer.state(dtype).items()
        }
        self._begun: Mapping[str, Array] = {}
        self._mixes = any(layer.mixes for layer in layers.values())
        self._kept: dict[str, tuple[State, Iterator[int]]] = {}

    def cuts(self, samples: int, *, apart: bool = False) -> list[slice]:
        """Micro-batches of unequal sizes; one where batch norm goes by all, unless ``apart``."""
        ends = (0, 1, *[samples // 2] * (samples > 4), samples)
        is_whole = samples < 2 or (self._mixes and not apart)
        return _WHOLE if is_whole else [slice(*two) for two in pairwise(ends)]

    def take(self, layer: int, following: Sequence[int] = ()) -> dict[str, Array]:
        """The parameters of a layer by its number."""
        name, own = self._stage.names[layer], self._stage.layers[layer][1]
        return {n: as_array(self.values[own.tied.get(n) or f"{name}.{n}"]) for n in own.shapes()}

    def release(self, layer: int) -> None:
        """All parameters stay."""

    def follow(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Take attributes that the program has set, by the names of the module's parts."""
        for layer in self._layers.values():
            layer.follow(changed)

    def take_back(self) -> None:
        """Restore the state that the latest step began with."""
        for name, values in self._begun.items():
            self.state[name][...] = values

    def compute(self, samples: Samples, context: Context, *, moved: bool = False) -> Passed:
        """Loss, gradients, outputs and state; ``moved``: those of the latest step once more."""
        if not moved:
            self._begun = {name: array.copy() for name, array in self.state.items()}
        context = replace(context, state=self._begun if moved else self.state)
        x = {n: as_array(nudged(p)) for n, p in as_tensors(fields(samples.inputs)).items()}
        both = [samples, replace(samples, inputs=joined(x))]
        both = both[::-1] if moved else both
        apart = self._apart(both, replace(context, training=False))
        return replace(self._passed(both[0], context, self.cuts(len(samples))), apart=apart)

    def _apart(self, both: Sequence[Samples], context: Context) -> Sequence[Passed]:
        """Results in a test, where batch norm keeps samples apart: of one and others, of all."""
        if not self._mixes or not self.state:
            return ()
        ways = (self.cuts(len(both[0]), apart=True), _WHOLE, _WHOLE)
        with suppress(Exception):  # a step does not do this
            return [self._passed(*one) for one in zip((both[0], *both), [context] * 3, ways)]
        if hasattr(self.loss, "fault"):
            self.loss.fault = None
        return ()

    def _passed(self, samples: Samples, context: Context, cuts: Sequence[slice]) -> Passed:
        ways = [(samples.inputs[r], replace(context, samples=context.samples[r])) for r in cuts]
        found: dict[str, Any] = dict.fromkeys(self.values)

        def add(layer: int, gradients: Gradients) -> None:
            tied, prefix = self._stage.layers[layer][1].tied, self._stage.names[layer]
            for own, one in gradients.items():
                if one is not None:
                    name, more = tied.get(own) or f"{prefix}.{own}", as_tensor(one) * times
                    found[name] = more if found[name] is None else found[name] + more

        with untouched(*self._modules):
            ys, saved = zip(*(self._stage.forward(self, *way) for way in ways), strict=True)
            value, dys, times = judged(self.loss, ys, [samples.labels[rows] for rows in cuts])
            if getattr(self.loss, "fault", None) is not None:
                raise ConfigError(str(self.loss.fault))
            for memory, dy in zip(saved, dys, strict=True):
                self._stage.backward(self, memory, dy, add)
        state = as_tensors({name: array.copy() for name, array in context.state.items()})
        return Passed(value, found, _joined(ys), state)

    def told(self, samples: int) -> str:
        """Sizes of the micro-batches."""
        return " and ".join(str(len(range(samples)[cut])) for cut in self.cuts(samples))

    def drawn(self, context: Context) -> Source | None:
        """Source of the numbers of the latest pass of the layers, for the whole module."""
        if not any(layer.draws for layer in self._layers.values()):
            return None
        where = {}
        for layer in self._layers.values():
            for place, own in layer.drawn():
                name = ".".join(filter(None, (layer.prefix.rstrip("."), place.name)))
                where[DrawPlace(True, (), name, place.turn)] = own

        def source(draws: Draws) -> Drawing:
            draws.where = dict(where)
            return Drawing(draws, context, np, ())

        return source

    def step(
        self, gradients: Mapping[str, Any], grouping: Grouping, step: int, rate: float
    ) -> None:
        """Update copies of the parameters, each as a whole or in two pieces, as ranks have them."""
        kind = torch.contiguous_format  # as_array() gives the memory of such ones
        self.values = {n: one.clone(memory_format=kind) for n, one in self.values.items()}
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            group = grouping(name).at(step)
            own = group.optimizer
            p, g = as_array(self.values[name]), as_array(gradient)
            new = {slot: np.zeros(p.size, p.dtype) for slot in own.slots}, count(1)
            slots, steps = self._kept.setdefault(name, new)
            third, flat, number = p.size // 3, own.whole, next(steps)
            for piece in (slice(None),) if flat else (slice(third), slice(third, None)):
                shape = p.shape if flat else (-1,)
                state = {slot: values[piece] for slot, values in slots.items()}
                a, b = (one.reshape(-1)[piece].reshape(shape) for one in (p, g))
                own.take_step(a, b, state, number, rate * group.rate, 1.0)


def judged(
    loss: Any, outputs: Sequence[Array], labels: Sequence[Array]
) -> tuple[float, list[Array], float]:
    """The loss of micro-batches, gradients by their outputs, and a factor on these."""
    divisor = 1.0 if reduction_of(loss) == "sum" else float(sum(one.size for one in labels))
    several, kind = getattr(loss, "several", 0), next(iter(fields(outputs[0]).values())).dtype
    if (several or reduction_of(loss) == "count") and getattr(loss, "is_counted", False):
        counts = np.array(loss.counts(np.concatenate(labels), kind))
        if several:
            loss.shares = counts / sum(map(len, labels))
        elif counts > 0:
            divisor = float(counts[0])
    parts = [loss(y, t, divisor) for y, t in zip(outputs, labels, strict=True)]
    times = 1.0
    if len(parts[0]) > 2:
        counted = float(sum(rest[0] for _, _, *rest in parts))
        times = divisor / counted if counted else nan
    return float(sum(one for one, *_ in parts)) * times, [dy for _, dy, *_ in parts], times


def _joined(parts: Sequence[Array]) -> Tensors:
    return as_tensors(fields(np.concatenate(parts)))
