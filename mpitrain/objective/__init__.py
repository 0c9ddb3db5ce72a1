"""Losses and metrics: sums over samples, however these are spread over ranks."""

from typing import Any, Literal, Protocol

from mpitrain import extras
from mpitrain.arrays import Array, Judged, Shape
from mpitrain.config import Loss as LossConfig
from mpitrain.data.dataset import Dataset
from mpitrain.group import TensorGroup
from mpitrain.objective.cross_entropy import CrossEntropy

__all__ = ["CrossEntropy", "LossFunction", "Reduction", "build", "reduction_of"]


#: Divisor of the losses of a batch: the number of its labels, the sum of the counts that calls
#: return, or 1.
Reduction = Literal["mean", "count", "sum"]


class LossFunction(Protocol):
    """Losses of labels, and their mean; a sample has one label, or an array of them.

    A loss whose ``reduction`` (see :func:`reduction_of`) is not ``"mean"`` has this attribute, with
    the same value on all ranks once :meth:`expect` has returned.
    """

    def __call__(self, outputs: Array, labels: Array, divisor: float) -> Judged:
        """Sum of the labels' losses, divided by ``divisor``, and its gradient by ``outputs``.

        If ``divisor`` counts the labels of the *global* batch, the sums over ranks of values and
        gradients are those of the global mean, however the samples are spread.  With the reduction
        ``"count"`` there is a third number, what counts in these samples, in any unit; the caller
        replaces ``divisor`` by its sum over the batch afterwards, as the gradient is linear in it.

        Args:
            outputs: outputs of the model, shape (N, ...); 16-bit floats are computed with in
                float32.
            labels: labels of the N samples; N may be 0, and then nothing counts.
            divisor: number of labels over which the caller averages; never 0.
        """

    def expect(self, outputs: Shape, labels: Shape, kind: Any) -> None:
        """Raise ValueError unless outputs and labels of these shapes of a sample can be compared.

        ``kind``: ``dtype`` of the labels.
        """


def reduction_of(loss: LossFunction) -> Reduction:
    """How a loss reduces a batch; ``"mean"`` if it does not say."""
    found: Reduction = getattr(loss, "reduction", "mean")
    return found


def build(config: LossConfig, data: Dataset, group: TensorGroup) -> LossFunction:
    """The loss of the [loss] table; ``group``: ranks that share the columns of the scores."""
    match config.name:
        case "cross_entropy":
            return CrossEntropy(group, data.classes, config.smoothing, config.ignored)
        case "mean_squared_error":
            return extras.MeanSquaredError()
        case "binary_cross_entropy":
            return extras.BinaryCrossEntropy()
