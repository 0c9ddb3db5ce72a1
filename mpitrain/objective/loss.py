"""What a loss is."""

from typing import Any, Protocol

from mpitrain.arrays import Array, Scalar, Shape


class Loss(Protocol):
    """A mean over labels: of each sample one, or as many as its label has values."""

    def __call__(self, outputs: Array, labels: Array, divisor: float) -> tuple[Scalar, Array]:
        """Sum of the labels' losses, divided by ``divisor``, and its gradient by ``outputs``.

        With the labels of the *global* batch as ``divisor``, the sums over ranks of the values and
        of the gradients are those of the global mean, however the batch was dealt out.

        Args:
            outputs: of the model, shape (N, ...); 16-bit floats are computed with in float32.
            labels: of the same N samples; N may be 0.
            divisor: number of labels over which the caller averages.
        """

    def expect(self, outputs: Shape, labels: Shape, kind: Any) -> None:
        """Whether it can compare these; ``ValueError`` says why not.

        Args:
            outputs: shape of what the model gives for one sample.
            labels: shape of one sample's label.
            kind: ``dtype`` of the labels.
        """
