"""What a data set is: labelled samples to train on, others to test on."""

from dataclasses import dataclass
from typing import Any

from mpitrain.nn import Array, Shape


@dataclass(frozen=True)
class Samples:
    """Inputs, shape (N, *input shape), and their labels, integers of shape (N,)."""

    inputs: Array
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: Any) -> "Samples":
        """The samples at a slice or an array of indices."""
        return Samples(self.inputs[which], self.labels[which])


@dataclass(frozen=True)
class Dataset:
    """Samples to train on and others to test on; labels lie in ``0 <= label < classes``."""

    train: Samples
    test: Samples
    classes: int

    @property
    def input_shape(self) -> Shape:
        """Shape of one sample."""
        return self.train.inputs.shape[1:]
