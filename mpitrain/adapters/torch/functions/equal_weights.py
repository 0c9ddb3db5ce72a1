"""Check that a function is a mean over samples of equal weights, or a sum and a count that add up.

A mean over other things (classes with weights, labels that are left out, padding, a root), or a sum
over samples that are compared with each other, is another number in every layout of ranks.
"""

from collections.abc import Sequence
from math import isclose, isfinite, isinf, prod
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
)
from mpitrain.adapters.torch.functions.reductions import Reduced, Reductions
from mpitrain.config import ConfigError
from mpitrain.data.generators import random_states
from mpitrain.fields import as_given

#: Rounding of a mean in float64, and of one that cannot be computed in float64.
_IN_FLOAT64, _OTHERWISE = 1e-9, 1e-3
#: Ways out for what is no mean.
_OF_METRICS = "or give mpitrain.AllSamples(function), which is called once, with all samples"
_OF_LOSSES = (
    "for several means, a list of such pairs; a loss that compares the samples of a batch with one "
    "another is for a loop of your own over torch.distributed: examples/pytorch/contrastive.py"
)


class _Difference(NamedTuple):
    """A value for samples beside copies of another one that is not what the values of both make.

    Attributes:
        name: ``"mean"``, ``"sum"`` or ``"count"``.
        whole, expected: these two.
    """

    name: str
    whole: float
    expected: float


class Sample(NamedTuple):
    """Samples of equal number, as the function takes them."""

    outputs: Tensors
    labels: Tensors


class EqualWeights:
    """Checks by values whether a function is a mean over samples of equal weights.

    A sum and a count of a micro-batch beside copies of one sample must be those of both together.

    The value of a micro-batch beside as many copies of one sample is the mean of both values if the
    micro-batch has the weight of these copies.  All micro-batches of all ranks and steps have equal
    weights, then, if all were compared with samples of one weight.  The one of two such samples
    whose value is further away shows more.  Where rounding is in doubt, float64 decides.

    Cost of a comparison: the function once more, of twice the samples, without gradients.

    Attributes:
        fault: the first fault, once it was seen.
    """

    def __init__(self, function: Function, what: str) -> None:
        """Compare nothing yet; ``what`` is the function's name in errors."""
        self._there, self._what, self._calls = function, what, 0
        #: Samples, the same on all ranks, or those of the least and the largest value so far.
        self._keeps, self._kept = True, list[Sample]()
        #: Types of samples, and the kept ones in these types with their numbers.
        self._known: tuple[Any, list[tuple[Sample, tuple[float, ...]]]] | None = None
        self.fault: ValueError | None = None

    def _say(self, fault: str) -> None:
        self.fault = self.fault or ConfigError(fault)

    @torch.no_grad()
    def compare(self, outputs: Tensors, labels: Tensors, result: Reduced) -> None:
        """Check a micro-batch, for which the function gives this ``result``."""
        own, found = Sample(outputs, labels), _numbers(result)
        if self.fault is not None or not all(map(isfinite, found)):
            return
        try:
            wrong = self._difference(own, found, getattr(result.total, "dtype", None))
            self.fault = None if wrong is None else self._fault(wrong, own, found)
        except MISFITS as error:
            self.fault = ConfigError(
                f"{self._what} cannot take some number of samples ({one_line(error)}); it must "
                "take any, as layouts have micro-batches of any size"
            )

    def _difference(self, own: Sample, found: Sequence[float], kind: Any) -> _Difference | None:
        """The difference of a micro-batch from a mean or sums, which more digits do not remove."""
        other, alone = self._furthest(own, found[0])
        least = torch.finfo(kind if kind in FLOATS else torch.float32).eps
        wrong = self._beside(own, other, found, alone, 64 * least)
        if wrong is None:
            return None
        try:
            with Wide():
                wide, other_wide = map(_as_wide_sample, (own, other))
                one, two = map(self._values, (wide, other_wide))
                return self._beside(wide, other_wide, one, two, _IN_FLOAT64)
        except MISFITS:  # the function cannot compute in float64
            return self._beside(own, other, found, self._values(other), _OTHERWISE)

    def _fault(self, wrong: _Difference, own: Sample, found: Sequence[float]) -> ConfigError:
        """The sentence about a difference."""
        twice = 2 * length(own.labels)
        instead = _OF_METRICS if self._what.startswith("metrics") else _OF_LOSSES
        states = random_states()
        again = self._values(own)
        what, cure = "", "draw them by torch in the module"
        if states != random_states():
            what = "draws random numbers"
        elif not all(isclose(*pair, rel_tol=1e-5) for pair in zip(found, again, strict=True)):
            what = (
                "keeps something from call to call, as a moving centre (it is "
                f"{found[0]:.6g} and then {again[0]:.6g} for the same samples)"
            )
            cure = "change what it reads between steps, in on_record="
        if what:
            return ConfigError(
                f"{self._what} {what}, and would be another one in every layout; {cure}, or take "
                "a loop of your own over torch.distributed"
            )
        if wrong.name != "mean":
            return ConfigError(
                f"{self._what} gives {wrong.whole:.6g} as the {wrong.name} of {twice} samples, and "
                f"{wrong.expected:.6g} for parts of them together; it must add up, or it is "
                f"another one in every layout: give a sum, no mean; {instead}"
            )
        shapes = [tuple(part.shape) for parts in own for part in parts.values()]
        if len({*shapes}) == 2 == len(shapes) and prod(shapes[0]) == prod(shapes[1]):
            return ConfigError(
                f"{self._what} compares outputs of shape {shapes[0]} with labels of {shapes[1]}, "
                "each sample with all others; give both one shape, as labels.view_as(outputs)"
            )
        return ConfigError(
            f"{self._what} of {twice} samples is {wrong.whole:.6g}, and the mean over them "
            f"{wrong.expected:.6g}; a single number must be a mean over samples with equal "
            "weights, or it is another one in every layout: return (sum, count), the sum of what "
            f"counts (labels that are not left out, weights) and its number; {instead}"
        )

    def _values(self, own: Sample) -> tuple[float, ...]:
        """A mean, or a sum and a count."""
        return _numbers(Reductions().of(self._there, *map(as_given, own)))

    def _beside(
        self,
        own: Sample,
        other: Sample,
        found: Sequence[float],
        alone: Sequence[float],
        rounding: float,
    ) -> _Difference | None:
        """The first difference of samples, which give ``found``, beside copies of another one."""
        count = length(own.labels)
        both = Sample(*(beside(part, one, count) for part, one in zip(own, other, strict=True)))
        # The mean of two means of equal weights, or the sum of two sums.
        names, times, parts = (["mean"], 1, 2) if len(found) == 1 else (["sum", "count"], count, 1)
        for name, whole, a, b in zip(names, self._values(both), found, alone, strict=True):
            expected, most = (a + times * b) / parts, max(abs(a), times * abs(b))
            # Nothing can be said about numbers that are too large.
            if not (isinf(whole) or abs(whole - expected) <= rounding * most):
                return _Difference(name, whole, expected)
        return None

    def _furthest(self, own: Sample, found: float) -> tuple[Sample, tuple[float, ...]]:
        """The kept sample whose value is furthest from ``found``, in these types; its numbers."""
        kinds = [part.dtype for parts in own for part in parts.values()]
        if self._known is None or self._known[0] != kinds:
            every = [Sample(*map(_like, one, own)) for one in self._kept]
            self._known = kinds, [(one, self._values(one)) for one in every]
        kept = [known for known in self._known[1] if all(map(_fits, known[0], own))]
        if self._keeps or not kept:  # padding gives them other sizes
            row, self._calls = self._calls * 7919 % length(own.labels), self._calls + 1
            new = Sample(*({n: p.clone() for n, p in rows(parts, row).items()} for parts in own))
            kept.append((new, self._values(new)))
            if self._keeps and isfinite(kept[-1][1][0]):
                # The older of equals: one of this micro-batch would have the weight of its others.
                kept = [choose(kept, key=lambda known: known[1][0]) for choose in (min, max)]
                self._kept, self._known = [one for one, _ in kept], (kinds, kept)
        return max(kept, key=lambda known: abs(known[1][0] - found))


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


def _as_wide_sample(one: Sample) -> Sample:
    return Sample(*({name: _as_wide(part) for name, part in parts.items()} for parts in one))


def _numbers(result: Reduced) -> tuple[float, ...]:
    total = float(result.total)
    return (total,) if result.count is None else (total, float(result.count))


def _fits(one: Tensors, others: Tensors) -> bool:
    """Whether samples have the sizes of others."""
    return all(part.shape[1:] == others[name].shape[1:] for name, part in one.items())


def _like(parts: Tensors, others: Tensors) -> dict[str, torch.Tensor]:
    return {name: part.to(others[name]) for name, part in parts.items()}


def no_loss(found: Reduced) -> str:
    """Why a function's result is no loss, a text that follows its name; empty: it is one."""
    total, count = found.total, 1.0 if found.count is None else found.count
    wrong = ""
    if not (isinstance(total, torch.Tensor) and not total.dim() and total.requires_grad):
        wrong = shown(total)
    elif isinstance(count, torch.Tensor) and count.requires_grad:
        wrong = "a count with a gradient, which would be lost: detach() it"
    else:
        try:
            wrong = "" if float(count) >= 0 else f"{float(count):g} as its count"
        except (RuntimeError, TypeError, ValueError):
            wrong = f"{shown(count)} as its count"
    return wrong and (
        f"gives {wrong}; a loss is one number that follows from the outputs, its mean over the "
        "samples, or (sum, count)"
    )


def shown(found: Any) -> str:
    """A result that is no loss or metric, in errors."""
    if not isinstance(found, torch.Tensor):
        return f"a {type(found).__name__}"
    return (
        f"a tensor of shape {tuple(found.shape)}" if found.dim() else "a number without a gradient"
    )
