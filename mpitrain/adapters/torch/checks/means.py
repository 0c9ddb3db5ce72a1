"""Check that losses and metrics are means over samples of equal weights, in every call.

A mean over other things (classes with weights, labels that are left out, padding, a root) is
another number in every layout of ranks.
"""

from math import isclose, isfinite, isinf
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

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
from mpitrain.fields import as_given

_ADVICE = (
    "it must be a mean over samples with equal weights, or else it is another one in every layout; "
    "do without class weights, ignore_index and masks, or divide the sum of what counts by "
    "labels.numel()"
)


class LossGradients(NamedTuple):
    """A loss, and its gradient by the outputs that it depends on."""

    value: float
    by: Tensors


class Slack(NamedTuple):
    """Rounding differences of gradients, relative to the largest one and to 1."""

    relative: float
    absolute: float


_IN_FLOAT64 = Slack(1e-6, 1e-12)
_OTHERWISE = Slack(1e-3, 1e-5)


class LossMeans:
    """Checks by gradients whether a loss is a mean over samples of equal weights.

    The gradient by the outputs of one sample among n is ``1 / n`` of that of the sample alone if
    the loss is such a mean, and another part otherwise: one sample shows the weight of all others
    in the micro-batch together.  Beside a label that all ranks and steps have in common, its part
    is one half if the micro-batches of all ranks have equal weights.  Three more samples go through
    the loss for each micro-batch.  Where rounding is in doubt, float64 decides.

    Attributes:
        fault: the first fault, once it was seen.
        label: the common label, of one row; if it is not set, the first label that is seen.
    """

    def __init__(self, function: Function, name: str) -> None:
        self._function, self._name, self._calls = function, name, 0
        self.fault: ValueError | None = None
        self.label: Tensors | None = None

    def compare(self, outputs: Tensors, labels: Tensors, whole: LossGradients) -> None:
        """Check one sample.

        Args:
            outputs: outputs for a micro-batch of at least one sample, in float32 or float64.
            labels: labels of the micro-batch.
            whole: loss of the micro-batch.
        """
        if self.label is None:
            self.label = {name: part[:1].clone() for name, part in labels.items()}
        if self.fault is None:
            self.fault = self._seen(outputs, labels, whole)

    def _seen(self, outputs: Tensors, labels: Tensors, whole: LossGradients) -> ValueError | None:
        self._calls += 1
        row = _strongest(whole.by, self._calls) if isfinite(whole.value) else None
        try:
            if row is None:
                return self._by_value(rows(outputs, 0), rows(labels, 0))
            least = torch.finfo(next(iter(whole.by.values())).dtype).eps
            if self._share(outputs, labels, row, whole.by, Slack(64 * least, 0.0)) is None:
                return None
            try:
                with Wide():
                    wide = {n: _as_wide(part) for n, part in outputs.items()}
                    by = self.gradients(wide, labels).by
                    share = self._share(wide, labels, row, by, _IN_FLOAT64)
            except MISFITS:  # the loss cannot compute in float64
                share = self._share(outputs, labels, row, whole.by, _OTHERWISE)
            if share is None:
                return None
            again = self.gradients(outputs, labels).value
        except MISFITS as error:
            return ConfigError(
                f"loss: {self._name} cannot take one sample or two ({one_line(error)}); "
                "it must take any number, as layouts have micro-batches of any size"
            )
        if not isclose(again, whole.value, rel_tol=1e-5):
            return ConfigError(
                f"loss: {self._name} gives {again:.6g} and {whole.value:.6g} for the same "
                f"{length(labels)} samples, as it draws random numbers or keeps something; it must "
                "follow from outputs and labels alone"
            )
        part, count = share
        return ConfigError(
            f"loss: {self._name} of {count} samples gives one of them a part of "
            f"{part:.6g} and not 1/{count} = {1 / count:.6g}; {_ADVICE}"
        )

    def _share(
        self, outputs: Tensors, labels: Tensors, row: int, whole: Tensors, slack: Slack
    ) -> tuple[float, int] | None:
        """The part of a sample in a mean, and the mean's samples; None if it is as it should be.

        ``row`` is the number of the sample in the micro-batch, ``whole`` are the gradients of the
        micro-batch.  Differences up to ``slack`` count as rounding.
        """
        sample, label = rows(outputs, row), rows(labels, row)
        count = length(labels)
        twice = beside(sample, sample), beside(label, self._common(label))
        _, by_two = self._mean(*twice)
        alone = self._mean(sample, label)[1] if count > 1 else whole
        for found, number, of in ((whole, count, row), (by_two, 2, 0)):
            if number > 1 and (part := _part(found, of, alone, number, slack)) is not None:
                return part, number
        return None

    def _common(self, like: Tensors) -> Tensors:
        """The common label, with the types of another one."""
        common = self.label or like
        return {name: common[name].to(part) for name, part in like.items()}

    def gradients(self, outputs: Tensors, labels: Tensors) -> LossGradients:
        """The loss of some samples, and its gradients by those outputs that it depends on.

        Raises:
            RuntimeError: the loss is no number that depends on the outputs.
        """
        mean, by = self._mean(outputs, labels)
        return LossGradients(mean.item(), by)

    def _mean(self, outputs: Tensors, labels: Tensors) -> tuple[torch.Tensor, Tensors]:
        leaves = {n: p.detach().requires_grad_(p.is_floating_point()) for n, p in outputs.items()}
        mean = self._function(as_given(leaves), as_given(labels))
        return mean, gradients(mean, leaves)

    @torch.no_grad()
    def _by_value(self, sample: Tensors, label: Tensors) -> ValueError | None:
        """Check a sample with two labels by its losses, where no gradient shows anything."""
        common = self._common(label)
        mean = sum(value(self._function, sample, one) for one in (label, common)) / 2
        found = value(self._function, beside(sample, sample), beside(label, common))
        is_unknown = isinf(found) or not (isfinite(found) or isfinite(mean))
        if is_unknown or isclose(found, mean, rel_tol=1e-3, abs_tol=1e-5):
            return None
        return ConfigError(
            f"loss: {self._name} of 2 samples is {found:.6g}, and the mean over them {mean:.6g}; "
            f"{_ADVICE}"
        )


class Wide(TorchFunctionMode):
    """Functions of torch compute in float64, whatever type a loss asks for or has constants in."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.float):
            function = torch.Tensor.double
        return tree_map(
            _as_wide, function(*tree_map(_as_wide, args), **tree_map(_as_wide, kwargs or {}))
        )


def _as_wide(value: Any) -> Any:
    """A narrower tensor in float64; float64 in the place of a narrower type."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value in FLOATS[:3] else value
    is_narrow = isinstance(value, torch.Tensor) and value.dtype in FLOATS[:3]
    return value.double() if is_narrow else value


def gradients(mean: torch.Tensor, outputs: Tensors) -> Tensors:
    """Gradients of a loss by those outputs that it depends on."""
    by = {name: part for name, part in outputs.items() if part.requires_grad}
    found = torch.autograd.grad(mean, list(by.values()), allow_unused=True)
    return {name: one for name, one in zip(by, found, strict=True) if one is not None}


def _strongest(by: Tensors, turn: int) -> int | None:
    """The sample with the largest gradient among four, or among all if these have none.

    None if no sample has a gradient, or one is not finite.
    """
    if not by:
        return None
    count = length(by)
    for few in (min(4, count), count):
        start = turn * few % (count - few + 1)
        each = [g[start : start + few].flatten(1).abs().amax(1) for g in by.values()]
        most, row = torch.stack(each).amax(0).max(0)
        if 0 < most.item() < float("inf"):
            return start + int(row)
    return None


def _part(found: Tensors, row: int, alone: Tensors, count: int, slack: Slack) -> float | None:
    """The part of a sample that differs most from ``1 / count``; None if only rounding differs.

    The sample is number ``row`` of ``count`` samples with the gradients ``found``; ``alone`` are
    its own gradients.
    """
    for name in found.keys() | alone.keys():
        like = found[name][row] if name in found else alone[name][0]
        whole = like if name in found else torch.zeros_like(like)
        one = alone[name][0] if name in alone else torch.zeros_like(like)
        apart = torch.sub(one, whole, alpha=count).abs_()
        if not bool(apart.max() <= slack.relative * one.abs().max() + slack.absolute):
            worst = apart.argmax()
            return float(whole.flatten()[worst] / one.flatten()[worst])
    return None


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
