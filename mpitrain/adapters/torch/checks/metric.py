"""Whether metrics are means over samples of equal weights, looked at in every call."""

from math import isfinite
from typing import Any, NamedTuple

import torch

from mpitrain.adapters.torch.checks.loss import FLOATS, MISFITS, Function, Tensors, rows
from mpitrain.config import ConfigError
from mpitrain.fields import as_given


class Kept(NamedTuple):
    """A sample, and the value of a metric of it alone."""

    value: float
    outputs: Tensors
    labels: Tensors


class MetricMeans:
    """Whether a function of samples is a mean over them, seen by its values.

    The value of a micro-batch beside as many copies of one sample is the mean of both values if all
    weigh the same.  Two samples are kept for that, those of the least and the largest value so far;
    where all values are equal, so is every mean.

    Attributes:
        fault: why it is none, once that was seen.
    """

    def __init__(self, function: Function, what: str) -> None:
        self._function, self._what = function, what
        self._calls = 0
        self._kept: list[Kept] = []
        self.fault: ValueError | None = None

    @torch.no_grad()
    def compare(self, outputs: Tensors, labels: Tensors, value: Any) -> None:
        """Look at a micro-batch, of which the function has this ``value``."""
        if self.fault is not None or not isfinite(found := float(value)):
            return
        count = len(next(iter(labels.values())))
        row, self._calls = self._calls * 7919 % count, self._calls + 1
        try:
            one: Tensors = rows(outputs, row)
            other: Tensors = rows(labels, row)
            alone = self._of(one, other)
            kept = [*self._kept, Kept(alone, _copied(one), _copied(other))]
            if isfinite(alone):
                self._kept = [min(kept, key=_value_of), max(kept, key=_value_of)]
            beside, one, other = max(kept, key=lambda entry: abs(entry.value - found))
            whole = self._of(_beside(outputs, one, count), _beside(labels, other, count))
        except MISFITS as error:
            self.fault = ConfigError(
                f"{self._what} cannot take some number of samples ({' '.join(str(error).split())})"
                "; it must take any, or return (sum, count)"
            )
            return
        kind = getattr(value, "dtype", None)
        slack = 64 * torch.finfo(kind if kind in FLOATS else torch.float32).eps
        mean = (found + beside) / 2
        if not abs(whole - mean) <= slack * max(abs(found), abs(beside)):
            self.fault = ConfigError(
                f"{self._what} of {2 * count} samples is {whole:.6g}, and the mean over them "
                f"{mean:.6g}; it must be a mean over samples with equal weights (labels that it "
                "leaves out count, too), or return (sum, count), or else it is another one in "
                "every layout"
            )

    def _of(self, outputs: Tensors, labels: Tensors) -> float:
        return float(self._function(as_given(outputs), as_given(labels)))


def _copied(parts: Tensors) -> Tensors:
    return {name: part.clone() for name, part in parts.items()}


def _value_of(kept: Kept) -> float:
    return kept.value


def _beside(parts: Tensors, one: Tensors, count: int) -> dict[str, torch.Tensor]:
    return {n: torch.cat([p, one[n].expand(count, *p.shape[1:])]) for n, p in parts.items()}
