"""Whether losses are means over samples of equal weights, looked at in every call.

A mean over other things (classes with weights, labels that are left out, padding, a root) is
another number in every layout of ranks.
"""

from collections.abc import Callable, Mapping
from math import isclose, isfinite, isinf
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from mpitrain.config import ConfigError
from mpitrain.fields import as_given

Tensors = Mapping[str, torch.Tensor]
#: ``f(outputs, labels)``, as torch's functional losses: tensors, or tuples or dictionaries of them,
#: as the module and the data set give them.
Function = Callable[[Any, Any], Any]
#: What functions raise that do not fit what they are given.
MISFITS = (RuntimeError, ValueError, TypeError, IndexError)
_ADVICE = (
    "it must be a mean over samples with equal weights, or else it is another one in every layout; "
    "do without class weights, ignore_index and masks, or divide the sum of what counts by "
    "labels.numel()"
)


class Gradients(NamedTuple):
    """A loss, and its gradient by the outputs that it follows from."""

    value: float
    by: Tensors


class Share(NamedTuple):
    """The part that one sample has in the mean of so many."""

    part: float
    samples: int


class Slack(NamedTuple):
    """How much gradients may differ by rounding, relative to the largest one and to 1."""

    relative: float
    absolute: float


_IN_FLOAT64 = Slack(1e-6, 1e-12)
_OTHERWISE = Slack(1e-3, 1e-5)


class LossMeans:
    """Whether a loss is a mean over samples of equal weights, seen by its gradients.

    The gradient by the outputs of one sample is ``1 / n`` of that of the sample alone if the loss
    of n samples is such a mean, and another part of it otherwise: one sample shows what all in the
    micro-batch weigh together.  Beside a label that all ranks and steps have in common, it has one
    half if the micro-batches of all of them weigh the same.  Three more samples go through the loss
    for each micro-batch.  Where rounding is in doubt, float64 decides.

    Attributes:
        fault: why it is none, once that was seen.
        label: the common one, of one row; the first that is seen, where nobody has set it.
    """

    def __init__(self, function: Function, name: str) -> None:
        self._function, self._name, self._calls = function, name, 0
        self.fault: ValueError | None = None
        self.label: Tensors | None = None

    def compare(self, outputs: Tensors, labels: Tensors, whole: Gradients) -> None:
        """Look at one sample.

        Args:
            outputs: of a micro-batch of at least one sample, in float32 or float64.
            labels: of it.
            whole: the loss of it.
        """
        if self.label is None:
            self.label = {name: part[:1].clone() for name, part in labels.items()}
        if self.fault is None:
            self.fault = self._seen(outputs, labels, whole)

    def _seen(self, outputs: Tensors, labels: Tensors, whole: Gradients) -> ValueError | None:
        count = len(next(iter(labels.values())))
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
            except MISFITS:  # it cannot compute in float64
                share = self._share(outputs, labels, row, whole.by, _OTHERWISE)
        except MISFITS as error:
            return self._not_alone(error)
        if share is None:
            return None
        if not isclose(again := self.gradients(outputs, labels).value, whole.value, rel_tol=1e-5):
            return ConfigError(
                f"loss: {self._name} gives {again:.6g} and {whole.value:.6g} for the same "
                f"{count} samples, as it draws random numbers or keeps something; it must follow "
                "from outputs and labels alone"
            )
        return ConfigError(
            f"loss: {self._name} of {share.samples} samples gives one of them a part of "
            f"{share.part:.6g} and not 1/{share.samples} = {1 / share.samples:.6g}; {_ADVICE}"
        )

    def _share(
        self, outputs: Tensors, labels: Tensors, row: int, whole: Tensors, slack: Slack
    ) -> Share | None:
        """The part that a sample has in a mean, if it is another one than it should be.

        Args:
            outputs: of the micro-batch.
            labels: of it.
            row: number of the sample.
            whole: gradients of the micro-batch.
            slack: differences that count as rounding.
        """
        sample, label = rows(outputs, row), rows(labels, row)
        count = len(next(iter(labels.values())))
        given = [self._two(sample, label), *([(sample, label)] if count > 1 else [])]
        beside, *found_alone = self._of_each(*given)
        alone = found_alone[0] if found_alone else whole
        for found, number, of in ((whole, count, row), (beside, 2, 0)):
            if number > 1 and (part := _part(found, of, alone, number, slack)) is not None:
                return Share(part, number)
        return None

    def _two(self, sample: Tensors, label: Tensors) -> tuple[Tensors, Tensors]:
        """The sample twice, the second time with the common label."""
        common = self._common(label)
        return (
            {name: torch.cat([part, part]) for name, part in sample.items()},
            {name: torch.cat([part, common[name]]) for name, part in label.items()},
        )

    def _common(self, like: Tensors) -> Tensors:
        """The common label, of this one's types."""
        common = self.label or like
        return {name: common[name].to(part) for name, part in like.items()}

    def _of_each(self, *given: tuple[Tensors, Tensors]) -> list[Tensors]:
        """Gradients of the losses of these outputs and labels, in one backward pass."""
        leaves = [_leaves(outputs) for outputs, _ in given]
        losses = [
            self._function(as_given(outputs), as_given(labels))
            for outputs, (_, labels) in zip(leaves, given, strict=True)
        ]
        wanted = [part for some in leaves for part in some.values() if part.requires_grad]
        found = iter(torch.autograd.grad(losses, wanted, allow_unused=True, materialize_grads=True))
        return [
            {name: next(found) for name, part in some.items() if part.requires_grad}
            for some in leaves
        ]

    def gradients(self, outputs: Tensors, labels: Tensors) -> Gradients:
        """The loss of some samples, and its gradients by those outputs that it follows from.

        Raises:
            RuntimeError: the loss is no number that follows from the outputs.
        """
        leaves = _leaves(outputs)
        mean = self._function(as_given(leaves), as_given(labels))
        return Gradients(mean.item(), gradients(mean, leaves))

    @torch.no_grad()
    def _by_value(self, sample: Tensors, label: Tensors) -> ValueError | None:
        """The same where no gradient shows anything: of two samples, by the losses of each."""
        one, other, found = (
            float(self._function(as_given(outputs), as_given(labels)))
            for outputs, labels in (
                (sample, label),
                (sample, self._common(label)),
                self._two(sample, label),
            )
        )
        mean = (one + other) / 2
        if isclose(found, mean, rel_tol=1e-3, abs_tol=1e-5) or (
            isinf(found)  # too large to tell
            or not (isfinite(found) or isfinite(mean))
        ):
            return None
        return ConfigError(
            f"loss: {self._name} of 2 samples is {found:.6g}, and the mean over them {mean:.6g}; "
            f"{_ADVICE}"
        )

    def _not_alone(self, error: Exception) -> ValueError:
        return ConfigError(
            f"loss: {self._name} cannot take one sample or two ({' '.join(str(error).split())}); "
            "it must take any number, as layouts have micro-batches of any size"
        )


#: Types of numbers, least precise first.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Wide(TorchFunctionMode):
    """Functions of torch compute in float64, whatever type a loss asks for or has constants in."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _CASTS:
            function = torch.Tensor.double
        return tree_map(
            _as_wide, function(*tree_map(_as_wide, args), **tree_map(_as_wide, kwargs or {}))
        )


_CASTS = (torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.float)


def _as_wide(value: Any) -> Any:
    """In float64 what is a tensor in less; float64 in the place of a type with less."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value in FLOATS[:3] else value
    is_narrow = isinstance(value, torch.Tensor) and value.dtype in FLOATS[:3]
    return value.double() if is_narrow else value


def gradients(mean: torch.Tensor, outputs: Tensors) -> Tensors:
    """Of a loss, by those of the outputs that it follows from."""
    by = {name: part for name, part in outputs.items() if part.requires_grad}
    found = torch.autograd.grad(mean, list(by.values()), allow_unused=True)
    return {name: one for name, one in zip(by, found, strict=True) if one is not None}


def _leaves(parts: Tensors) -> dict[str, torch.Tensor]:
    return {n: p.detach().requires_grad_(p.is_floating_point()) for n, p in parts.items()}


def rows(parts: Tensors, row: int) -> dict[str, torch.Tensor]:
    """The sample of this number, as a batch."""
    return {name: part.detach()[row : row + 1] for name, part in parts.items()}


def _strongest(by: Tensors, turn: int) -> int | None:
    """Of four samples, or of all where these have none, the one with the largest gradient.

    None if none has a gradient, or one is not finite.
    """
    if not by:
        return None
    count = len(next(iter(by.values())))
    for few in (min(4, count), count):
        start = turn * few % (count - few + 1)
        each = [g[start : start + few].flatten(1).abs().amax(1) for g in by.values()]
        most, row = torch.stack(each).amax(0).max(0)
        if 0 < most.item() < float("inf"):
            return start + int(row)
    return None


def _part(found: Tensors, row: int, alone: Tensors, count: int, slack: Slack) -> float | None:
    """The part of a sample that differs most from ``1 / count``, if one does by more than rounding.

    Args:
        found: gradients of so many samples.
        row: the sample's number among them.
        alone: gradients of the sample alone.
        count: samples.
        slack: what counts as rounding.
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
