"""Functions of a program over outputs and labels, and metrics that are some."""

from typing import Any

import numpy as np
import torch

from mpitrain.adapters.torch.arrays import (
    NARROW,
    Moved,
    as_tensors,
    moved,
    named_tensors,
    on_stream_of,
)
from mpitrain.adapters.torch.checks.probe import Form, Function
from mpitrain.adapters.torch.functions.equal_weights import EqualWeights, shown
from mpitrain.adapters.torch.functions.lent import Lent
from mpitrain.adapters.torch.functions.reductions import COUNT, LOSS, Reductions
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.fields import as_given, fields, named
from mpitrain.objective.metrics import SumAndCount
from mpitrain.ranks.same import name_of


class Following:
    """A function of outputs and labels, called on their device.

    Tensors of a module, such as weights of classes, are copied to a GPU once, and again when they
    have changed; other functions do that themselves, as by ``weights.to(outputs.device)``.  A
    module's own loss is one number for the function; returned as it is, it is a sum and a count.

    Attributes:
        kept: tensors of the function by name, if it is a module; they follow from no samples.
        lent: parameters that the function reads.
    """

    def __init__(self, function: Function, form: Form = as_given) -> None:
        self.__name__ = name_of(function)
        self._function, self._form, self.lent = function, form, Lent({})
        self._moved: Moved = {}

    @property
    def kept(self) -> dict[str, torch.Tensor]:
        if not isinstance(self._function, torch.nn.Module):
            return {}
        return named_tensors(self._function)

    def __call__(self, outputs: Any, labels: Any) -> Any:
        if not isinstance(outputs, dict) or COUNT not in outputs:
            return self._of(outputs, labels)
        total, count = outputs[LOSS].sum(), outputs[COUNT].sum().detach()
        mean = total / torch.where(count > 0, count, 1)
        others = {name: part for name, part in outputs.items() if name != COUNT}
        found = self._of(others | {LOSS: mean}, labels)
        return (total, count) if found is mean else found

    @torch.no_grad()
    def of_arrays(self, outputs: Array, labels: Array) -> Any:
        """The result for arrays."""
        return self(*(as_given(in_float32(as_tensors(fields(one)))) for one in (outputs, labels)))

    def _of(self, outputs: Any, labels: Any) -> Any:
        function, kept = self._function, self.kept
        values = named(outputs)
        device, outputs = next(iter(values.values())).device, self._form(values)
        if isinstance(function, torch.nn.Module) and any(t.device != device for t in kept.values()):
            there = {name: moved(self._moved, name, t, device) for name, t in kept.items()}
            return torch.func.functional_call(function, there, (outputs, labels))
        with self.lent.there():
            return function(outputs, labels)


class Judge:
    """A function of outputs and labels, whose results are checked for the samples that it sees.

    Attributes:
        function: the function.
    """

    def __init__(self, function: Function, what: str, form: Form = as_given) -> None:
        """``what`` is the function's name in errors; ``form``: that of the outputs."""
        self.function = function
        self._there = Following(function, form)
        self._weights = EqualWeights(self._there, f"{what}: {name_of(function)}")

    @property
    def fault(self) -> ValueError | None:
        """The first fault that samples have shown."""
        return self._weights.fault

    def _say(self, fault: str) -> None:
        self._weights.fault = self._weights.fault or ConfigError(fault)


class TorchMetric(Judge, SumAndCount):
    """A function that gives the mean over its samples, or ``(sum, count)``."""

    def __init__(self, function: Function, name: str = "one", form: Form = as_given) -> None:
        super().__init__(function, f"metrics: {name}", form)
        self._name = name

    def add(self, outputs: Array, labels: Array) -> Array:
        if not len(labels):
            return np.zeros(2)
        scores, truth = in_float32(as_tensors(fields(outputs))), as_tensors(fields(labels))
        with torch.no_grad(), on_stream_of(outputs):
            found = Reductions().of(self._there, as_given(scores), as_given(truth))
        try:
            whole, times = float(found.total), len(labels)
            count = float(len(labels) if found.count is None else found.count)
        except (RuntimeError, TypeError, ValueError):
            self._say(
                f"metrics: {self._name} gives {shown(found.total)}; it must give a number, its "
                "mean over the samples, or (sum, count)"
            )
            return np.zeros(2)
        if found.reduction == "sum" or not found.is_known:
            self._weights.compare(scores, truth, found)
        return np.array([whole * (1 if found.reduction == "count" else times), count])


def in_float32(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of 16 bits in float32."""
    return {n: part.float() if part.dtype in NARROW else part for n, part in parts.items()}
