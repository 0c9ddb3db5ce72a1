"""Metrics of tests besides the loss: sums over samples, which ranks add up, and their value.

Counts add up exactly, whatever the layout of the ranks.
"""

from collections.abc import Callable, Sequence
from math import exp, inf, nan
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from collectives.errors import words
from mpitrain.arrays import Array, array_namespace
from mpitrain.config import ConfigError
from mpitrain.group import TensorGroup
from mpitrain.nn.layer import widened
from mpitrain.objective import CrossEntropy


class Metric(Protocol):
    """A number about all test samples."""

    def add(self, outputs: Array, labels: Array) -> Array:
        """Contribution of some samples to the totals: float64, of the same length for any samples.

        Collective over the tensor ranks of the last stage, each of which then has all of it.
        """

    def value(self, totals: Array) -> float:
        """The number, from the sum of all samples' :meth:`add`."""


class SumAndCount:
    """A metric whose totals are a sum and a count."""

    def value(self, totals: Array) -> float:
        return float(totals[0] / totals[1]) if totals[1] else nan


class Averaged(SumAndCount):
    """A function ``f(outputs, labels)`` that is a mean over its samples, or ``(sum, count)``.

    The totals of a micro-batch beside as many copies of one sample must be those of both together;
    else the metric would be another number in every layout.  Costs the function of twice the
    samples, and of some single ones.

    Attributes:
        fault: the first fault, once it was seen.
    """

    def __init__(self, function: Callable[[Array, Array], Any], name: str = "one of them") -> None:
        self.function = function
        self.fault: ConfigError | None = None
        self._name, self._calls = name, 0
        self._kept: list[tuple[Array, Array]] = []

    def add(self, outputs: Array, labels: Array) -> Array:
        if not len(labels):
            return np.zeros(2)
        try:
            totals = self._totals(outputs, labels)
            if self.fault is None and np.isfinite(totals).all():
                self._compare(outputs, labels, totals)
        except _Misfit as error:
            self._say(str(error))
            return np.zeros(2)
        return totals

    def _totals(self, outputs: Array, labels: Array) -> Array:
        # It may write into its arguments.
        found = self.function(outputs.copy(), labels.copy())
        try:
            if isinstance(found, tuple):
                total, count = map(float, found)
                return np.array([total, count])
            return np.array([len(labels) * float(found), len(labels)])
        except (TypeError, ValueError) as error:
            raise _Misfit(
                f"gives a {type(found).__name__}; it must give a number, its mean over the "
                "samples, or (sum, count)"
            ) from error

    def _compare(self, outputs: Array, labels: Array, totals: Array) -> None:
        """Check the totals of a micro-batch beside copies of the sample that is furthest off."""
        xp, n = array_namespace(outputs), len(labels)
        row, self._calls = self._calls * 7919 % n, self._calls + 1
        kept = [*self._kept, (outputs[row : row + 1].copy(), labels[row : row + 1].copy())]
        kept = [one for one in kept if _are_alike(one[0], outputs) and _are_alike(one[1], labels)]
        try:
            alone = [(self._totals(*one), *one) for one in kept]
            alone.sort(key=lambda one: self.value(one[0]))
            self._kept = [one[1:] for one in (alone[0], alone[-1])]
            other, *sample = max(alone, key=lambda o: abs(self.value(o[0]) - self.value(totals)))
            whole = self._totals(
                *(
                    xp.concatenate([own, xp.repeat(one, n, axis=0)])
                    for own, one in zip((outputs, labels), sample, strict=True)
                )
            )
        except _Misfit:
            raise
        except Exception as error:  # whatever a program's own function raises
            raise _Misfit(
                f"cannot take some number of samples ({words(error)}); it must take any, as "
                "layouts have micro-batches of any size"
            ) from error
        both = totals + n * other
        slack = 1e-3 * np.maximum(abs(totals), n * abs(other))
        if np.isfinite(whole).all() and (abs(whole - both) > slack).any():
            raise _Misfit(
                f"gives {self.value(whole):.6g} for {2 * n} samples, and parts of them together "
                f"{self.value(both):.6g}; return a mean over samples with equal weights, or "
                "(sum, count), which add up, and compare no sample with others of its batch"
            )

    def _say(self, why: str) -> None:
        self.fault = self.fault or ConfigError(f"metrics: {self._name} {why}")


class _Misfit(Exception):
    """A function is no mean, and no sum and count; the message follows its name."""


def _are_alike(one: Array, other: Array) -> bool:
    return one.shape[1:] == other.shape[1:] and one.dtype == other.dtype


class Counting:
    """A metric of classes without the labels that do not count."""

    def __init__(self, metric: Metric, ignored: int) -> None:
        """``ignored``: the value of these labels."""
        self._metric, self._ignored = metric, ignored
        self.value = metric.value

    def add(self, outputs: Array, labels: Array) -> Array:
        counts = labels.reshape(-1) != self._ignored
        rows = outputs.reshape(len(counts), outputs.shape[-1])
        return self._metric.add(rows[counts], labels.reshape(-1)[counts])


class ClassesFirst:
    """A metric of classes whose scores lie along the first axis of a sample, as in torch."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self.value = metric.value

    def add(self, outputs: Array, labels: Array) -> Array:
        return self._metric.add(array_namespace(outputs).moveaxis(outputs, 1, -1), labels)


class TopKAccuracy(SumAndCount):
    """Part of the labels that are among the ``k`` highest scores; of equal ones the first count.

    Columns of the scores may lie on the ranks of a group.
    """

    def __init__(self, group: TensorGroup, classes: int, k: int = 1) -> None:
        self.group = group
        self.classes = classes
        self.k = k

    def add(self, scores: Array, labels: Array) -> Array:
        places = self.places(scores, labels)
        return np.array([float((places < self.k).sum()), labels.size])

    def places(self, scores: Array, labels: Array) -> Array:
        """Number of scores before each label's."""
        xp = array_namespace(scores)
        rows = widened(scores).reshape(labels.size, -1 if labels.size else scores.shape[-1])
        flat, start = labels.reshape(-1), self.group.share(self.classes).start
        picked = self.group.sum(_picked(rows, flat - start))[:, None]
        before = xp.arange(start, start + rows.shape[1]) < flat[:, None]
        places = self.group.sum(((rows > picked) | ((rows == picked) & before)).sum(axis=1))
        return xp.where(xp.isnan(picked[:, 0]), self.classes, places)


class Perplexity(SumAndCount):
    """``exp`` of the mean cross-entropy, without smoothing."""

    def __init__(self, group: TensorGroup, classes: int) -> None:
        self.loss = CrossEntropy(group, classes)

    def add(self, scores: Array, labels: Array) -> Array:
        return np.array([float(self.loss(scores, labels, 1.0)[0]), labels.size])

    def value(self, totals: Array) -> float:
        mean = super().value(totals)
        return inf if mean >= 700 else exp(mean)


class F1:
    """Mean over the classes of ``2 tp / (2 tp + fp + fn)`` (macro); absent classes are left out."""

    def __init__(self, group: TensorGroup, classes: int) -> None:
        self.group = group
        self.classes = classes

    def add(self, scores: Array, labels: Array) -> Array:
        xp = array_namespace(scores)
        rows = widened(scores).reshape(labels.size, -1 if labels.size else scores.shape[-1])
        best, own = _largest(rows), self.group.share(self.classes)
        # A rank without columns votes for the last class.
        index = rows.argmax(axis=1) + own.start if rows.shape[1] else self.classes - 1
        index = xp.where(best == self.group.sum(best, MPI.MAX), index, self.classes - 1)
        return self.counts(self.group.sum(index, MPI.MIN), labels.reshape(-1))

    def counts(self, found: Array, labels: Array) -> Array:
        """True positives, predictions and labels of each class."""
        right = labels[found == labels]
        return np.concatenate(
            [np.bincount(w, minlength=self.classes).astype(float) for w in (right, found, labels)]
        )

    def value(self, totals: Array) -> float:
        right, found, labels = totals.reshape(3, self.classes)
        occurs = found + labels > 0
        return float((2 * right[occurs] / (found + labels)[occurs]).mean())


class BinaryAccuracy(SumAndCount):
    """Part of the outputs that are above 0 exactly if their label is above 1/2."""

    def add(self, outputs: Array, labels: Array) -> Array:
        right = (outputs.reshape(-1) > 0) == (labels.reshape(-1) > 0.5)
        return np.array([float(right.sum()), labels.size])


class MeanError(SumAndCount):
    """Mean of ``|output - label|**power``, to the power of ``1 / power``."""

    def __init__(self, power: int) -> None:
        self.power = power

    def add(self, outputs: Array, labels: Array) -> Array:
        error = widened(outputs).reshape(-1).astype(float) - labels.reshape(-1)
        return np.array([float((abs(error) ** self.power).sum()), labels.size])

    def value(self, totals: Array) -> float:
        return super().value(totals) ** (1 / self.power)


def build(
    names: Sequence[str],
    loss: str,
    classes: int,
    group: TensorGroup,
    ignored: int | None = None,
) -> dict[str, Metric]:
    """The metrics of these names for models that were trained with ``loss``.

    ``ignored``: labels of classes that do not count; None: all count.
    """

    def one(name: str) -> Metric:
        found = made(name)
        return found if ignored is None or not classes else Counting(found, ignored)

    def made(name: str) -> Metric:
        match name:
            case "accuracy" if loss == "binary_cross_entropy":
                return BinaryAccuracy()
            case "accuracy":
                return TopKAccuracy(group, classes)
            case "perplexity":
                return Perplexity(group, classes)
            case "f1":
                return F1(group, classes)
            case "mae" | "rmse":
                return MeanError(1 if name == "mae" else 2)
            case _:
                return TopKAccuracy(group, classes, int(name.removeprefix("top")))

    return {name: one(name) for name in names}


def _largest(rows: Array) -> Array:
    """The largest score of each row; ``-inf`` without columns."""
    xp = array_namespace(rows)
    if not rows.shape[1]:
        return xp.full(len(rows), -xp.inf, rows.dtype)
    found: Array = rows.max(axis=1)
    return found


def _picked(rows: Array, column: Array) -> Array:
    """Each row's element in its column; 0 where the column is another rank's."""
    xp = array_namespace(rows)
    count, columns = rows.shape
    if not columns:
        return xp.zeros(count, rows.dtype)
    own = (column >= 0) & (column < columns)
    picked: Array = rows[xp.arange(count), xp.where(own, column, 0)]
    return xp.where(own, picked, picked.dtype.type(0))
