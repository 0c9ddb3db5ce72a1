"""Losses that compare outputs and labels number by number."""

from abc import ABC, abstractmethod
from math import prod
from typing import Any

from mpitrain.arrays import Array, Scalar, Shape, array_namespace
from mpitrain.nn.layer import widened


class ElementwiseLoss(ABC):
    """A mean over all numbers of a label."""

    def expect(self, outputs: Shape, labels: Shape, kind: Any) -> None:
        if kind.kind not in "fiub":
            raise ValueError(f"labels must be numbers, not {kind}")
        # (N, 1) and (N,) hold the same; other shapes of the same size may be a mistake.
        if prod(outputs) != prod(labels) or (outputs != labels and prod(labels) != 1):
            raise ValueError(
                f"the model gives {outputs} for a sample, and its label has the shape {labels}; "
                "they are compared number by number and must be alike"
            )

    def __call__(self, outputs: Array, labels: Array, divisor: float) -> tuple[Scalar, Array]:
        """See :class:`~mpitrain.objective.LossFunction`; labels have the outputs' shape."""
        given = widened(outputs)
        wanted = labels.reshape(given.shape).astype(given.dtype, copy=False)
        values, gradient = self.compare(given, wanted)
        gradient /= divisor
        return values.sum() / divisor, gradient.astype(outputs.dtype, copy=False)

    @abstractmethod
    def compare(self, given: Array, wanted: Array) -> tuple[Array, Array]:
        """The loss of each number, and its derivative, in new arrays."""


class MeanSquaredError(ElementwiseLoss):
    """``(output - label)**2``."""

    def compare(self, given: Array, wanted: Array) -> tuple[Array, Array]:
        difference = given - wanted
        return difference * difference, 2 * difference


class BinaryCrossEntropy(ElementwiseLoss):
    """Cross-entropy of ``sigmoid(output)`` and a probability, 0 or 1 for instance."""

    def compare(self, given: Array, wanted: Array) -> tuple[Array, Array]:
        xp = array_namespace(given)
        # log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), which overflows nowhere.
        small = xp.exp(-abs(given))
        values = xp.maximum(given, 0) + xp.log1p(small) - given * wanted
        sigmoid = xp.where(given >= 0, 1, small) / (1 + small)
        return values, sigmoid - wanted
