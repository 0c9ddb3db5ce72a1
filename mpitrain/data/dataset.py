"""Data sets: labelled samples to train on, and perhaps others to test on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mpitrain.arrays import Array, Shape
from mpitrain.fields import Fields, fields

if TYPE_CHECKING:
    from mpitrain.data.sampler import Sampler


class DataError(ValueError):
    """Data cannot be read, or are wrong; the message names the file or the sample."""


@dataclass(frozen=True)
class Samples:
    """Inputs, shape (N, *input shape), and their labels of shape (N, ...)."""

    inputs: Array
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: Any) -> "Samples":
        return Samples(self.inputs[which], self.labels[which])


class Indexed(Protocol):
    """Samples that may be read only when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, which: Any) -> Samples:
        """The samples at a slice or an array of indices."""


def _shape(samples: Array) -> Shape:
    return Fields(samples.dtype) if samples.dtype.names else samples.shape[1:]


@dataclass(frozen=True)
class Dataset:
    """Samples to train on and others to test on.

    Attributes:
        train: samples to train on.
        test: samples to test on, or None.
        classes: number of classes, ``0 <= label < classes``; 0 if labels are numbers.
        sampler: makes the order of the samples of their number, the size of a batch and the seed;
            None: the usual one.
        varies: whether the arrays of some samples may have other sizes than those of others, as
            after padding.
        in_turn: whether losses and metrics take the parts of a label as arguments in turn.
    """

    train: Indexed
    test: Indexed | None
    classes: int
    sampler: "Callable[[int, int, int], Sampler] | None" = None
    varies: bool = False
    in_turn: bool = False

    @cached_property
    def _first(self) -> Samples:
        return self.train[:1]

    @property
    def input_shape(self) -> Shape:
        return _shape(self._first.inputs)

    @property
    def input_dtype(self) -> Any:
        return self._first.inputs.dtype

    @property
    def label_shape(self) -> Shape:
        """Shape of a sample's label: () for a class, (positions,) for text; of the first sample."""
        return _shape(self._first.labels)

    @property
    def label_dtype(self) -> Any:
        return self._first.labels.dtype

    @property
    def labels_per_sample(self) -> int:
        """Numbers in a label: 1 for a class, the positions for text."""
        return prod(self.label_shape)

    @property
    def tokens(self) -> int:
        """Tokens of a sample, integers in a line, as are its labels; 0: it has none, or varies."""
        parts = (fields(one).values() for one in vars(self._first).values())
        lines = [[p.shape[1] for p in own if p.dtype.kind in "iu" and p.ndim == 2] for own in parts]
        return 0 if self.varies or not all(lines) else max(lines[0])

    @property
    def outputs(self) -> int:
        """Number of a model's outputs for a sample: scores of classes, or numbers of the label."""
        return self.classes or self.labels_per_sample


def alike(path: Path, train: Samples, test: Samples, *, ignored: int | None = None) -> Dataset:
    """Data set of a file's samples, with the classes that integer labels have.

    ``ignored``: the label that is no class, if there is one.

    Raises:
        DataError: there are none of one kind, or samples to train and to test on differ.
    """
    for what, one, other in zip(("inputs", "labels"), vars(train).values(), vars(test).values()):
        if one.shape[1:] != other.shape[1:] or one.dtype.kind != other.dtype.kind:
            raise DataError(
                f"{path}: a sample's {what} are {one.shape[1:]} {one.dtype} to train and "
                f"{other.shape[1:]} {other.dtype} to test on; they must be the same"
            )
    if not len(train) or not len(test):
        raise DataError(f"{path}: there are no samples to train and to test on")
    if not train.labels.size:
        raise DataError(f"{path}: labels of shape {train.labels.shape} hold none")
    if train.labels.dtype.kind == "f":
        return Dataset(train, test, 0)
    every = (train.labels, test.labels)
    most = [
        int(labels.max(where=ignored is None or labels != ignored, initial=0)) for labels in every
    ]
    return Dataset(train, test, max(most) + 1)
