"""Losses and metrics: sums over samples, however these are spread over ranks."""

from typing import Any, Protocol

from mpitrain.arrays import Array, Scalar, Shape
from mpitrain.config import Loss as LossConfig
from mpitrain.data.dataset import Dataset
from mpitrain.group import TensorGroup
from mpitrain.objective.cross_entropy import CrossEntropy
from mpitrain.objective.elementwise import BinaryCrossEntropy, MeanSquaredError

__all__ = ["BinaryCrossEntropy", "CrossEntropy", "LossFunction", "MeanSquaredError", "build"]


class LossFunction(Protocol):
    """A mean over labels; a sample has one label, or an array of them."""

    def __call__(self, outputs: Array, labels: Array, divisor: float) -> tuple[Scalar, Array]:
        """Sum of the labels' losses, divided by ``divisor``, and its gradient by ``outputs``.

        If ``divisor`` counts the labels of the *global* batch, the sums over ranks of values and
        gradients are those of the global mean, however the samples are spread.

        Args:
            outputs: outputs of the model, shape (N, ...); 16-bit floats are computed with in
                float32.
            labels: labels of the N samples; N may be 0.
            divisor: number of labels over which the caller averages.
        """

    def expect(self, outputs: Shape, labels: Shape, kind: Any) -> None:
        """Check that outputs and labels can be compared; ``ValueError`` says why not.

        Args:
            outputs: shape of the model's output for one sample.
            labels: shape of one sample's label.
            kind: ``dtype`` of the labels.
        """


def build(config: LossConfig, data: Dataset, group: TensorGroup) -> LossFunction:
    """The loss of the [loss] table; ``group``: ranks that share the columns of the scores."""
    match config.name:
        case "cross_entropy":
            return CrossEntropy(group, data.classes, config.smoothing)
        case "mean_squared_error":
            return MeanSquaredError()
        case "binary_cross_entropy":
            return BinaryCrossEntropy()
