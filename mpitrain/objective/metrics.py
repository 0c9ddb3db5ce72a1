"""Metrics of tests besides the loss: sums over samples, which ranks add up, and their value.

Counts add up exactly, whatever the layout of the ranks.
"""

from collections.abc import Callable, Sequence
from math import exp, inf, nan
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpitrain.arrays import Array, array_namespace
from mpitrain.fields import fields
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


class AllSamples:
    """A metric of all test samples at once, in their order, as an AUC.

    Rank 0 has outputs and labels of the whole test in memory, and calls the function.
    """

    def __init__(self, function: Callable[[Array, Array], Any]) -> None:
        """``function`` of all outputs and labels gives a number, or ``(sum, count)``."""
        self.function = function

    def value(self, outputs: Array, labels: Array) -> float:
        found = self.function(outputs, labels)
        total, count = map(float, found if isinstance(found, tuple) else (found, 1))
        return total / count if count else nan


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


class OwnPerplexity(SumAndCount):
    """``exp`` of the mean loss that a model computes itself."""

    def add(self, outputs: Array, labels: Array) -> Array:
        own = fields(outputs)
        return np.array([float(own[name].sum()) for name in ("loss", "loss_count")])

    def value(self, totals: Array) -> float:
        mean = super().value(totals)
        return inf if mean >= 700 else exp(mean)


class Perplexity(OwnPerplexity):
    """``exp`` of the mean cross-entropy, without smoothing."""

    def __init__(self, group: TensorGroup, classes: int) -> None:
        self.loss = CrossEntropy(group, classes)

    def add(self, scores: Array, labels: Array) -> Array:
        return np.array([float(self.loss(scores, labels, 1.0)[0]), labels.size])


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
        scores = 2 * right[occurs] / (found + labels)[occurs]
        return float(scores.mean()) if len(scores) else nan


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
