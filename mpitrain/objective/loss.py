"""The interface of a loss."""

from typing import Any, Protocol

from mpitrain.arrays import Array, Scalar, Shape


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
