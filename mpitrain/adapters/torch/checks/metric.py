"""Check that metrics are means over samples of equal weights, in every call."""

from math import isfinite
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from mpitrain.adapters.torch.checks.probe import (
    FLOATS,
    MISFITS,
    Function,
    Tensors,
    beside,
    length,
    one_line,
    rows,
    value,
)
from mpitrain.config import ConfigError


class _Sample(NamedTuple):
    """A sample, and the value of a metric for it alone."""

    value: float
    outputs: Tensors
    labels: Tensors


class MetricMeans:
    """Checks by values whether a function of samples is a mean over them.

    The value of a micro-batch beside as many copies of one sample is the mean of both values if all
    samples have equal weights.  Two samples are kept for that, those of the least and the largest
    value so far; where all values are equal, so is every mean.

    Attributes:
        fault: the first fault, once it was seen.
    """

    def __init__(self, function: Function, what: str) -> None:
        self._function, self._what = function, what
        self._calls = 0
        self._kept: list[_Sample] = []
        self.fault: ValueError | None = None

    @torch.no_grad()
    def compare(self, outputs: Tensors, labels: Tensors, result: Any) -> None:
        """Check a micro-batch, for which the function gives this ``result``."""
        if self.fault is not None or not isfinite(found := float(result)):
            return
        count = length(labels)
        row, self._calls = self._calls * 7919 % count, self._calls + 1
        try:
            one, label = _copied(rows(outputs, row)), _copied(rows(labels, row))
            kept = [*self._kept, _Sample(value(self._function, one, label), one, label)]
            if isfinite(kept[-1].value):
                key = attrgetter("value")
                self._kept = [min(kept, key=key), max(kept, key=key)]
            alone, one, label = max(kept, key=lambda entry: abs(entry.value - found))
            two = beside(outputs, one, count), beside(labels, label, count)
            whole = value(self._function, *two)
        except MISFITS as error:
            self.fault = ConfigError(
                f"{self._what} cannot take some number of samples ({one_line(error)})"
                "; it must take any, or return (sum, count)"
            )
            return
        kind = getattr(result, "dtype", None)
        slack = 64 * torch.finfo(kind if kind in FLOATS else torch.float32).eps
        mean = (found + alone) / 2
        if not abs(whole - mean) <= slack * max(abs(found), abs(alone)):
            self.fault = ConfigError(
                f"{self._what} of {2 * count} samples is {whole:.6g}, and the mean over them "
                f"{mean:.6g}; it must be a mean over samples with equal weights (labels that it "
                "leaves out count, too), or return (sum, count), or else it is another one in "
                "every layout"
            )


def _copied(parts: Tensors) -> Tensors:
    return {name: part.clone() for name, part in parts.items()}
