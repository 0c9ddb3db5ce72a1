"""Softmax cross-entropy; the ranks of a tensor-parallel group may share the scores."""

from functools import partial
from typing import Any

from mpi4py import MPI

from mpitrain.arrays import Array, Judged, Scalar, Shape, array_namespace
from mpitrain.group import TensorGroup
from mpitrain.kernels import kernels_of
from mpitrain.kernels.host import cross_entropy
from mpitrain.nn.layer import widened


class CrossEntropy:
    """``-log softmax(scores)[label]``; columns of the scores may lie on the ranks of a group.

    Two numbers a row are summed over the group and one compared; the scores are not gathered.  With
    ``smoothing`` e, a part e of each label is spread evenly over the classes (Szegedy et al. 2016).
    Labels that are ``ignore_index`` do not count: the loss is the mean over the others.

    Attributes:
        group: ranks that share the columns.
        classes: number of columns on all ranks together.
        smoothing: 0 <= e < 1.
        ignore_index: value of labels that do not count; None: all count.
        reduction: see :func:`mpitrain.objective.reduction_of`.
        is_counted: whether labels say what counts.
    """

    def __init__(
        self,
        group: TensorGroup,
        classes: int,
        smoothing: float = 0.0,
        ignore_index: int | None = None,
    ) -> None:
        self.group = group
        self.classes = classes
        self.smoothing = smoothing
        self.ignore_index, self.is_counted = ignore_index, True
        self.reduction = "mean" if ignore_index is None else "count"

    def expect(self, outputs: Shape, labels: Shape, kind: Any) -> None:
        if kind.kind not in "iu":
            raise ValueError(f"cross-entropy needs integers from 0 as labels, not {kind}")
        if outputs != (*labels, self.classes):
            raise ValueError(
                f"the model gives {outputs} for a sample, and cross-entropy needs scores of "
                f"{self.classes} classes for each of its labels: {(*labels, self.classes)}"
            )

    def counts(self, labels: Array, kind: Any = None) -> list[int]:
        """Number of the labels that count."""
        return [int((labels != self.ignore_index).sum())]

    def __call__(self, outputs: Array, labels: Array, divisor: float) -> Judged:
        """See :class:`~mpitrain.objective.LossFunction`; outputs are scores, (..., own classes)."""
        wide = widened(outputs)
        rows = wide.reshape(-1, wide.shape[-1])
        flat = labels.reshape(-1)
        if self.ignore_index is None:
            value, gradient = self._of(rows, flat, divisor)
            return value, self._like(outputs, gradient)
        counts = flat != self.ignore_index
        gradient = array_namespace(rows).zeros_like(rows)
        value, gradient[counts] = self._of(rows[counts], flat[counts], divisor)
        return value, self._like(outputs, gradient), counts.sum()

    def _of(self, rows: Array, flat: Array, divisor: float) -> tuple[Scalar, Array]:
        """The loss of rows of scores, all of which count, and its gradient."""
        if self.group.size == 1:
            return kernels_of(rows).softmax_loss(rows, flat, divisor, self.smoothing)
        losses, gradient = cross_entropy(
            rows,
            flat,
            divisor,
            self.smoothing,
            self.classes,
            self.group.share(self.classes).start,
            largest=partial(self.group.sum, op=MPI.MAX),
            sums=self.group.sum,
        )
        return losses.sum() / divisor, gradient

    @staticmethod
    def _like(outputs: Array, gradient: Array) -> Array:
        """The gradient in the shape and type of the outputs."""
        return gradient.reshape(outputs.shape).astype(outputs.dtype, copy=False)
