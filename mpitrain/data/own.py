"""A program's map-style data set: ``len(data)`` and ``data[i]``, as torch's are."""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from collectives.errors import words
from mpitrain.arrays import Array, Shape, is_floating
from mpitrain.data.dataset import DataError, Samples
from mpitrain.fields import joined, named

#: Arrays of one sample by name (:mod:`mpitrain.fields`).
Named = Mapping[str, Array]
#: Input and label of a sample.
Pair = tuple[Named, Named]


class MapStyle(Protocol):
    """``(input, label)`` pairs by number; each is an array, or a tuple or dictionary of arrays."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class OwnSamples:
    """Samples that are read one by one when they are needed.

    Python's, NumPy's and torch's generators are seeded by seed, epoch and number of the sample
    while it is read, and restored afterwards: a sample does not depend on the rank and time of its
    reading.

    Attributes:
        data: the program's data set.
        dtype: type of floating-point values.
        seed: seed of the job.
        epoch: epoch, counted from 0; -1 for tests.
        classes: number of classes; 0 if labels are numbers.
    """

    data: MapStyle
    dtype: DTypeLike
    seed: int = 0
    epoch: int = -1
    classes: int = 0

    def __len__(self) -> int:
        return len(self.data)

    def in_epoch(self, epoch: int) -> "OwnSamples":
        """Samples of that epoch."""
        return replace(self, epoch=epoch)

    def __getitem__(self, which: Any) -> Samples:
        """The samples at a slice or an array of indices.

        Raises:
            DataError: a sample cannot be read, is no pair, or is not like the others.
        """
        try:
            indices = np.arange(len(self))[which].tolist()
        except IndexError as error:
            raise DataError(self._shrunk) from error
        # Without samples, the first one gives the shapes.
        read = indices or [0]
        pairs = [self._read(index) for index in indices] or [self.first()]
        inputs, labels = (
            self._stacked(read, what, values)
            for what, values in zip(("input", "label"), zip(*pairs, strict=True), strict=True)
        )
        return Samples(inputs[: len(indices)], labels[: len(indices)])

    def first(self) -> Pair:
        """A sample with the shapes of all."""
        return self._read(0)

    def read_anew(self) -> None:
        """Reads a sample in this process, beside all passes."""
        self._read(0)

    def _read(self, index: int) -> Pair:
        with seeded(self.seed, 1, self.epoch + 1, index):
            try:
                found = self.data[index]
            except (Exception, SystemExit) as error:  # or the other ranks would wait
                if isinstance(error, IndexError) and len(self) <= index:
                    raise DataError(self._shrunk) from error
                raise self._wrong(index, f" cannot be read: {words(error)}") from error
        return self._arrays_of(index, found)

    @property
    def _shrunk(self) -> str:
        return (
            f"{type(self.data).__name__} has {len(self)} samples now, and had more when the run "
            "began; its length must stay as it is"
        )

    def _wrong(self, index: int, why: str) -> DataError:
        return DataError(f"sample {index} of {type(self.data).__name__}{why}")

    def _arrays_of(self, index: int, found: Any) -> Pair:
        if isinstance(found, Mapping):  # all of it is for the model
            found = found, found.get("labels", False)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            several = isinstance(found, (tuple, list))
            raise self._wrong(
                index,
                f" is a {type(found).__name__}{f' of {len(found)}' if several else ''}; a pair is "
                "needed, (input, label), each of which may be a tuple or a dictionary, as "
                "(x, (y, weight))",
            )
        return self._arrays(index, found[0]), self._arrays(index, found[1])

    def _arrays(self, index: int, value: Any) -> Named:
        try:
            parts = named(value)
        except ValueError as error:
            raise self._wrong(index, f": {error}") from error
        if not parts:
            raise self._wrong(index, " holds nothing")
        return {name: self._array(index, part) for name, part in parts.items()}

    def _array(self, index: int, value: Any) -> Array:
        try:
            found = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # on a GPU, or with a gradient
            raise self._wrong(
                index, f" holds a {type(value).__name__} that is no array: {error}"
            ) from error
        if not found.size:
            raise self._wrong(index, " holds an empty array")
        floating = is_floating(found.dtype)
        if not floating and found.dtype.kind not in "iub":
            raise self._wrong(index, f" holds {found.dtype}; inputs and labels are numbers")
        return found.astype(self.dtype) if floating else found

    def _stacked(self, indices: Sequence[int], what: str, values: Sequence[Named]) -> Array:
        first = values[0]
        for index, value in zip(indices, values, strict=True):
            if _kinds(value) != _kinds(first):
                raise DataError(
                    f"the {what} of sample {index} of {type(self.data).__name__} is "
                    f"{_shown(value)}, and that of sample {indices[0]} {_shown(first)}; all must "
                    "be alike: pad unequal lengths to one in the data set, and give lengths or a "
                    "mask beside"
                )
        return joined({name: np.stack([value[name] for value in values]) for name in first})


def _kinds(value: Named) -> list[tuple[str, Any, Shape]]:
    return [(name, array.dtype, array.shape) for name, array in value.items()]


def _shown(value: Named) -> str:
    return ", ".join(
        f"{name and f'{name!r}: '}{kind} of shape {shape}" for name, kind, shape in _kinds(value)
    )


@contextmanager
def seeded(seed: int, *key: int) -> Iterator[None]:
    """Context in which Python's, NumPy's and torch's generators are seeded by these numbers."""
    words = np.random.SeedSequence(seed, spawn_key=key).generate_state(2)
    before, numpy_before = random.getstate(), np.random.get_state()
    torch: Any = sys.modules.get("torch")  # if the program uses it
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
