"""A data set of one's own: ``len(data)`` and ``data[i]``, as torch's are."""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.arrays import Array
from mpitrain.data.dataset import Samples
from mpitrain.data.errors import DataError


class MapStyle(Protocol):
    """``(input, label)`` pairs by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class Own:
    """Samples read one by one when they are asked for.

    What is random in reading a sample follows from the seed, the epoch and the sample's number, not
    from who reads it and when: Python's, NumPy's and torch's generators are seeded so while it is
    read, and then as they were before.

    Attributes:
        data: where they come from.
        dtype: type of floating-point values.
        seed: of the job.
        epoch: counted from 0; of tests -1.
        classes: of labels; 0 if they are numbers.
    """

    data: MapStyle
    dtype: DTypeLike
    seed: int = 0
    epoch: int = -1
    classes: int = 0

    def __len__(self) -> int:
        return len(self.data)

    def in_epoch(self, epoch: int) -> "Own":
        """The same, as that epoch reads them."""
        return replace(self, epoch=epoch)

    def __getitem__(self, which: Any) -> Samples:
        """The samples at a slice or an array of indices.

        Raises:
            DataError: a sample cannot be read, is no pair, or is not like the others.
        """
        indices = np.arange(len(self))[which].tolist()
        # Of no samples, the first says the shapes.
        pairs = [self._read(index) for index in indices or [0]]
        inputs, labels = (
            self._stacked(indices or [0], what, values)
            for what, values in zip(("input", "label"), zip(*pairs, strict=True), strict=True)
        )
        return Samples(inputs[: len(indices)], labels[: len(indices)])

    def _read(self, index: int) -> tuple[Array, Array]:
        with _seeded(self.seed, self.epoch, index):
            try:
                found = self.data[index]
            except Exception as error:
                raise DataError(
                    f"sample {index} of {type(self.data).__name__} cannot be read: "
                    f"{type(error).__name__}: {error}"
                ) from error
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise DataError(
                f"sample {index} of {type(self.data).__name__} is a {type(found).__name__}; a pair "
                "is needed, (input, label)"
            )
        inputs, labels = self._array(index, found[0]), self._array(index, found[1])
        if self.classes and labels.size and not 0 <= labels.min() <= labels.max() < self.classes:
            raise DataError(
                f"sample {index} of {type(self.data).__name__} has the label {labels}; labels of "
                f"{self.classes} classes lie from 0 to {self.classes - 1}"
            )
        return inputs, labels

    def _array(self, index: int, value: Any) -> Array:
        try:
            found = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # on a GPU, or with a gradient
            raise DataError(
                f"sample {index} of {type(self.data).__name__} holds a {type(value).__name__} that "
                f"is no array: {error}"
            ) from error
        if found.dtype.kind not in "fiub" and found.dtype.name != "bfloat16":
            raise DataError(
                f"sample {index} of {type(self.data).__name__} holds {found.dtype}; inputs and "
                "labels are numbers"
            )
        return found.astype(self.dtype) if found.dtype.kind == "f" else found

    def _stacked(self, indices: Sequence[int], what: str, values: Sequence[Array]) -> Array:
        first = values[0]
        for index, value in zip(indices, values, strict=True):
            if (value.shape, value.dtype) != (first.shape, first.dtype):
                raise DataError(
                    f"the {what} of sample {index} of {type(self.data).__name__} is {value.dtype} "
                    f"of shape {value.shape}, and that of sample {indices[0]} {first.dtype} of "
                    f"{first.shape}; all must be alike"
                )
        return np.stack(values)


@contextmanager
def _seeded(seed: int, epoch: int, index: int) -> Iterator[None]:
    """The generators that a data set may use, for one sample."""
    words = np.random.SeedSequence(seed, spawn_key=(1, epoch + 1, index)).generate_state(2)
    before, numpy_before = random.getstate(), np.random.get_state()
    torch = _torch()
    torch_before = torch.get_rng_state() if torch else None
    random.seed(int(words[0]))
    np.random.seed(words)
    if torch:
        torch.default_generator.manual_seed(int(words[0]) << 32 | int(words[1]))
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
        if torch:
            torch.set_rng_state(torch_before)


def _torch() -> Any:
    """If the program uses it."""
    return sys.modules.get("torch")
