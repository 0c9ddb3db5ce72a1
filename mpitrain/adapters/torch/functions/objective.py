"""Losses and metrics that are functions of torch tensors."""

import warnings
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import torch

from mpitrain.adapters.torch.arrays import (
    NARROW,
    Moved,
    as_array,
    as_tensors,
    moved,
    named_tensors,
    on_stream_of,
)
from mpitrain.adapters.torch.checks.probe import MISFITS, Form, Function, Tensors, one_line, rows
from mpitrain.adapters.torch.functions.equal_weights import EqualWeights, Sample, no_loss, shown
from mpitrain.adapters.torch.functions.lent import Lent, gradients, stray
from mpitrain.adapters.torch.functions.reductions import COUNT, LOSS, Reduced, Reductions
from mpitrain.arrays import Array, Judged, Scalar, Shape, array_namespace
from mpitrain.config import ConfigError
from mpitrain.fields import as_given, fields, filled, joined, named, partial, resized, sizes, zeros
from mpitrain.objective import Reduction
from mpitrain.objective.metrics import SumAndCount
from mpitrain.ranks.same import name_of

#: How results of the three reductions are called.
_KINDS = {"mean": "a mean", "count": "a sum and what counts", "sum": "a sum"}
_BY_OUTPUTS = (
    "gives several sums, with counts that follow from the outputs; they must follow from labels "
    "alone, or return one (sum, count)"
)


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
        return self(*(as_given(_wide(as_tensors(fields(one)))) for one in (outputs, labels)))

    def _of(self, outputs: Any, labels: Any) -> Any:
        function, kept = self._function, self.kept
        values = named(outputs)
        device, outputs = next(iter(values.values())).device, self._form(values)
        if isinstance(function, torch.nn.Module) and any(t.device != device for t in kept.values()):
            there = {name: moved(self._moved, name, t, device) for name, t in kept.items()}
            return torch.func.functional_call(function, there, (outputs, labels))
        with self.lent.there():
            return function(outputs, labels)


class TorchLoss(EqualWeights):
    """A function of outputs and labels: the mean over its samples, or ``(sum, count)``.

    Means of torch's own losses are sums and counts, too, where labels do not count or have weights
    (:class:`Reductions`); with ``reduction="sum"``, the sum over the batch is the
    loss.  Any other mean over a micro-batch is weighted by its part of the global batch, so that
    samples must have equal weights: if not, it is an error in the first step in which it matters
    (:class:`~mpitrain.adapters.torch.functions.equal_weights.EqualWeights`).  Outputs in 16 bits
    are cast to float32 before, as under ``torch.autocast``.

    A list of pairs ``(sum, count)`` is the sum of several means over other things each.  The counts
    follow from the labels, so that they are known for the whole batch before the step.

    Attributes:
        several: number of these pairs; 0: it gives none.
        shares: what counts in each of them, divided by the samples of the batch.
        reduction: see :func:`mpitrain.objective.reduction_of`; known after :meth:`expect`.
        ignore_index: value of labels that do not count; None: unknown.
        is_counted: whether labels say what counts, without outputs.
    """

    def __init__(self, function: Function, form: Form = as_given, lent: Lent | None = None) -> None:
        """``ConfigError``: the function has parameters, which nobody would train."""
        own = function.parameters() if isinstance(function, torch.nn.Module) else ()
        if any(parameter.requires_grad for parameter in own):
            raise ConfigError(
                f"loss: {name_of(function)} has parameters of its own, which nobody would train; "
                "put it into the model, as self.criterion, and give a function that calls it there"
            )
        there = Following(function, form)
        super().__init__(there, f"loss: {name_of(function)}")
        self.function, self._lent = function, lent or Lent({})
        there.lent = self._lent
        self._unused: frozenset[str] = frozenset()
        self._casts = self._is_plain = False
        self._reductions = Reductions()
        self._reductions.moving = self._lent.moving
        self.several, self.shares, self.is_counted = 0, np.empty(0), False
        self.reduction: Reduction = "mean"
        self.ignore_index: int | None = None

    def __call__(self, outputs: Array, labels: Array, divisor: float) -> Judged:
        """See :class:`mpitrain.objective.LossFunction`."""
        if labels.size:
            with on_stream_of(outputs):
                return self._of(outputs, labels, divisor)
        gradient = partial(filled(outputs, len(outputs), 0), self._unused)
        return (0.0, gradient, 0.0) if self.reduction == "count" else (0.0, gradient)

    def _of(self, outputs: Array, labels: Array, divisor: float) -> Judged:
        xp = array_namespace(outputs)
        parts = as_tensors(fields(outputs))
        wide = _needing_gradients(_wide(parts))
        truth = self._cast(as_tensors(fields(labels)), wide)
        versions = [part._version for part in truth.values()]
        reduced = self._reductions.of(self._there, as_given(wide), as_given(truth))
        if self.several:
            kind = next(iter(fields(outputs).values())).dtype
            reduced = self._over_shares(reduced.total, labels, kind)
        is_sum = self.several or self.reduction == "count"
        if is_sum and not getattr(reduced.total, "requires_grad", False):
            reduced = reduced._replace(total=_constant(reduced.total, wide, self._unused))
        every = {**wide, **self._lent.values}
        by = gradients(reduced.total, every)
        is_apart = reduced.is_known  # torch's own loss of these alone
        if not is_apart and (name := stray({"": reduced.total}, every, self._lent.trained)):
            self._say(
                f"loss: {name_of(self.function)} follows from {name} by another way than outputs "
                "and labels, whose gradient would be lost; return what it reads from the module as "
                "an output, with a row for each sample"
            )
        if fault := self._reductions.fault:
            self._say(f"loss: {name_of(self.function)} {fault}")
        elif versions != [part._version for part in truth.values()]:
            self._say(
                f"loss: {name_of(self.function)} changes its labels in place, which are the data's "
                "own; let it work on labels.clone()"
            )
        elif not self.several:
            self._look(reduced, wide, truth)
        weight = (labels.size if self.reduction == "mean" else 1) / divisor
        weight /= len(labels) if self.several else 1
        self._lent.add(by, weight)
        used = {n: (by[n] * weight).to(part.dtype) for n, part in parts.items() if n in by}
        found = {name: used.get(name, torch.zeros_like(part)) for name, part in parts.items()}
        whole = joined({name: as_array(gradient, xp) for name, gradient in found.items()})
        self._unused = frozenset(found.keys() - used.keys())
        gradient = partial(whole, self._unused)
        value = _scalar(reduced.total.detach().double() * weight, xp)
        if self.reduction == "count":
            counted = 0.0 if reduced.count is None else reduced.count
            count = torch.as_tensor(counted, device=reduced.total.device)
            return value, gradient, _scalar(count, xp)
        return value, gradient

    def _over_shares(self, pairs: Any, labels: Array, kind: Any) -> Reduced:
        """The sum of several means, times the samples of the batch."""
        if not len(self.shares):
            self.shares = np.ones(self.several)
            self._say(
                "loss: several sums and counts do not go with servers and asynchronous pipelines; "
                "return one (sum, count) there"
            )
        elif [float(count) for _, count in pairs] != self.counts(labels, kind):
            self._say(f"loss: {name_of(self.function)} {_BY_OUTPUTS}")
        return Reduced(sum(one / float(n) for (one, _), n in zip(pairs, self.shares, strict=True)))

    @torch.no_grad()
    def counts(self, labels: Array, kind: Any = np.float64) -> list[float]:
        """Numbers that count in some labels, in each of the sums, computed in ``kind``.

        The function is called with outputs that are not there: NaN where it goes by these.
        """
        if self._is_plain and labels.dtype.names is None:
            return [float((labels != self.ignore_index).sum())]
        wide = torch.float64 if np.dtype(kind) == np.float64 else torch.float32
        before, after = (sizes(*one) for one in (self._shapes[1], (labels.dtype, labels.shape[1:])))
        lengths = dict(zip(before, after, strict=True))  # of axes that padding changes
        given, shape = self._shapes[0]
        given, shape = resized(given, shape, [lengths.get(n, n) for n in sizes(given, shape)])
        like, truth = fields(np.zeros((1, *shape), given)), as_tensors(fields(labels))
        absent = next(iter(truth.values())).new_full((), torch.nan, dtype=wide)
        y = {n: absent.expand(len(labels), *one.shape[1:]) for n, one in like.items()}
        try:
            truth = self._cast(truth, y)
            found = Reductions(counts=True).of(self._there, as_given(y), as_given(truth))
            pairs = found.total if self.several else [found[:2]]
            return [float(count) for _, count in pairs]
        except Exception:  # the function may raise anything of what is not there
            return [torch.nan] * (self.several or 1)

    @torch.no_grad()
    def add(self, outputs: Array, labels: Array) -> Array:
        """Several sums, and then counts, of a test, as those of a metric."""
        if not len(labels):
            return np.zeros(2 * self.several)
        with on_stream_of(outputs):
            y = _wide(as_tensors(fields(outputs)))
            truth = self._cast(as_tensors(fields(labels)), y)
            pairs = self._there(as_given(y), as_given(truth))
            return np.array([float(one) for each in zip(*pairs, strict=True) for one in each])

    def value(self, totals: Array) -> float:
        """The sum of several means."""
        return float((totals[: self.several] / totals[self.several :]).sum())

    def _look(self, reduced: Reduced, outputs: Tensors, labels: Tensors) -> None:
        """Check the result for some samples."""
        if reduced.reduction != self.reduction:
            self._say(
                f"loss: {name_of(self.function)} gives {_KINDS[self.reduction]} for some samples "
                f"and {_KINDS[reduced.reduction]} for others; all must be alike, as (sum, count)"
            )
        elif reduced.reduction == "mean" and not reduced.is_known:
            self.compare(outputs, labels, reduced)

    def expect(self, outputs: Shape, labels: Shape, kind: Any) -> None:
        """Try the loss on drawn samples, two together and one by one; settle its reduction."""
        refused: Exception | None = None
        self._shapes = [(getattr(one, "dtype", np.dtype("f4")), one) for one in (outputs, labels)]
        kinds = (torch.float32, torch.float64)  # the function may hold weights of either type
        for wide, self._casts in product(kinds, (False, True)):
            given = _drawn(zeros(2, outputs, np.float32), wide, 1)
            wanted = self._cast(_drawn(zeros(2, labels, kind), wide, 2), given)
            try:
                with warnings.catch_warnings():  # shapes that are broadcast, old arguments
                    warnings.filterwarnings("error", "Using a |size_average", UserWarning)
                    parts, found = self._tried(given, wanted)
                    pairs = found.total if isinstance(found.total, list) else [found[:2]]
                    wrong = next(filter(None, (no_loss(Reduced(*pair)) for pair in pairs)), "")
                    if isinstance(found.total, list):
                        self.several = len(pairs)
                        found = Reduced(sum(one for one, _ in pairs), is_known=True)
                    by = {} if wrong else gradients(found.total, parts)
                    self._tried(rows(given, 0), rows(wanted, 0))
                break
            except (*MISFITS, AttributeError, KeyError, UserWarning) as error:
                refused = refused or error
        else:
            cure = "; let it work on outputs.clone()" * ("in-place" in str(refused))
            if isinstance(getattr(refused, "obj", None), torch.nn.Module):
                cure = "; return what it reads from the module as an output, which has rows"
            raise ValueError(
                f"{name_of(self.function)} cannot compare outputs of shape {outputs!r} with labels "
                f"of {labels}: {one_line(refused)}{cure}"
            ) from refused
        two = joined(zeros(2, labels, kind))
        self.is_counted = not np.isnan(self.counts(two, str(wide)[6:])).any()
        wrong = _BY_OUTPUTS if self.several and not self.is_counted else wrong
        if wrong:
            raise ValueError(f"{name_of(self.function)} {wrong}")
        self._lent.learn(found.total)
        # A rank may have no samples in the first batch, and must know the unused fields then, too.
        self._unused = frozenset(parts.keys() - by.keys())
        self.reduction, self.ignore_index = found.reduction, self._reductions.ignore_index
        self._is_plain = found[2:] == ("count", True) and not self._reductions.weighs
        self._keeps, self._kept = False, [Sample(rows(given, n), rows(wanted, n)) for n in (0, 1)]
        self._look(found, given, wanted)
        # Later sums may change their unit from step to step, and are not compared.
        if found.reduction == "count" and not found.is_known:
            self.compare(given, wanted, found)
        if self.fault is not None:
            raise ValueError(str(self.fault).removeprefix("loss: "))

    def plain(self, given: Any, outputs: Tensors, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss as a loop of torch has it, of outputs as the module has ``given`` them."""
        found = self.function(given, as_given(self._cast(labels, dict(outputs))))
        pairs = [found] if isinstance(found, tuple) else found
        total: torch.Tensor = sum(a / b for a, b in pairs) if isinstance(pairs, list) else found
        return total

    def _cast(
        self, labels: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Labels that are integers or bools, in the type of the outputs, if these are cast."""
        if not self._casts or "" not in labels or labels[""].is_floating_point():
            return labels
        return {"": labels[""].to(next(iter(outputs.values())).dtype)}

    def _tried(self, outputs: Tensors, labels: Tensors) -> tuple[dict[str, torch.Tensor], Reduced]:
        """Copies of outputs, and their loss."""
        parts = _needing_gradients({name: part.clone() for name, part in outputs.items()})
        truth = {name: part.clone() for name, part in labels.items()}
        return parts, self._reductions.of(self._there, as_given(parts), as_given(truth))


class TorchMetric(EqualWeights, SumAndCount):
    """A function that gives the mean over its samples, or ``(sum, count)``."""

    def __init__(self, function: Function, name: str = "one", form: Form = as_given) -> None:
        super().__init__(Following(function, form), f"metrics: {name}: {name_of(function)}")
        self._name = name

    def add(self, outputs: Array, labels: Array) -> Array:
        if not len(labels):
            return np.zeros(2)
        scores, truth = _wide(as_tensors(fields(outputs))), as_tensors(fields(labels))
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
            self.compare(scores, truth, found)
        return np.array([whole * (1 if found.reduction == "count" else times), count])


def _wide(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of 16 bits in float32."""
    return {n: part.float() if part.dtype in NARROW else part for n, part in parts.items()}


def _drawn(arrays: Mapping[str, Array], wide: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Samples of numbers between 0 and 1; integers are 0 and 1, as for two classes."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, part in as_tensors(arrays).items():
        if part.is_floating_point():
            found[name] = torch.rand(part.shape, generator=draw, dtype=wide)
        else:
            classes = torch.arange(len(part)).reshape(-1, *[1] * (part.dim() - 1)) % 2
            found[name] = part + classes.to(part.dtype)
    return found


def _needing_gradients(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: part.requires_grad_(part.is_floating_point()) for name, part in parts.items()}


def _constant(value: Any, outputs: Tensors, unused: frozenset[str]) -> torch.Tensor:
    """A sum that a function gives as a constant where nothing counts; its gradients are 0."""
    used = [part[:0].sum() for name, part in outputs.items() if name not in unused]
    total: torch.Tensor = sum(part for part in used if part.requires_grad) + value
    return total


def _scalar(number: torch.Tensor, xp: Any) -> Scalar:
    """A tensor of one number in memory, or as an array of the device."""
    return number.item() if xp is np else as_array(number.double(), xp)
