"""Softmax cross-entropy, whose scores the ranks of a tensor-parallel group may share."""

from typing import Any

from mpi4py import MPI

from mpitrain.arrays import Array, Shape, array_namespace
from mpitrain.group import TensorGroup
from mpitrain.nn.layer import widened


class CrossEntropy:
    """``-log softmax(scores)[label]``; columns of the scores may lie on the ranks of a group.

    Two numbers a row are summed over the group and one compared, rather than gathering the scores.
    With ``smoothing`` e, a part e of each label is spread evenly over the classes (Szegedy et al.
    2016).

    Attributes:
        group: the ranks that share the columns.
        classes: columns on all of them together.
        smoothing: 0 <= e < 1.
    """

    def __init__(self, group: TensorGroup, classes: int, smoothing: float = 0.0) -> None:
        self.group = group
        self.classes = classes
        self.smoothing = smoothing

    def expect(self, outputs: Shape, labels: Shape, kind: Any) -> None:
        if kind.kind not in "iu":
            raise ValueError(f"cross-entropy needs integers from 0 as labels, not {kind}")
        if outputs != (*labels, self.classes):
            raise ValueError(
                f"the model gives {outputs} for a sample, and cross-entropy needs scores of "
                f"{self.classes} classes for each of its labels: {(*labels, self.classes)}"
            )

    def __call__(self, outputs: Array, labels: Array, divisor: float) -> tuple[float, Array]:
        """As :class:`~mpitrain.objective.Loss` says; outputs are scores, (..., own classes)."""
        xp = array_namespace(outputs)
        wide = widened(outputs)
        rows = wide.reshape(-1, wide.shape[-1])
        bounds = self.group.share(self.classes)
        column = labels.reshape(-1) - bounds.start
        own = (column >= 0) & (column < rows.shape[1])
        where = (xp.nonzero(own)[0], column[own])
        even = self.smoothing / self.classes

        shifted = rows - self.group.sum(rows.max(axis=1, initial=-xp.inf), MPI.MAX)[:, None]
        picked = xp.zeros((2, len(rows)), rows.dtype)
        picked[0, own] = (1 - self.smoothing) * shifted[where]
        if even:
            picked[0] += even * shifted.sum(axis=1)
        gradient = xp.exp(shifted, out=shifted)
        picked[1] = gradient.sum(axis=1)
        picked = self.group.sum(picked)
        loss = (xp.log(picked[1]) - picked[0]).sum() / divisor
        gradient /= picked[1][:, None]
        gradient[where] -= 1 - self.smoothing
        if even:
            gradient -= even
        gradient /= divisor
        return float(loss), gradient.reshape(outputs.shape).astype(outputs.dtype, copy=False)
