"""A program's map-style data set: ``len(data)`` and ``data[i]``, as torch's are."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import DTypeLike

from collectives.errors import words
from mpitrain.arrays import Array, Shape, is_floating
from mpitrain.data.dataset import DataError, Samples
from mpitrain.data.generators import kept_generators, random_states, seed_generators, seeded
from mpitrain.fields import joined, named

#: Arrays of one sample by name (:mod:`mpitrain.fields`).
Named = Mapping[str, Array]
#: Input and label of a sample, or of the samples of a micro-batch.
Pair = tuple[Named, Named]
#: Makes a batch of a list of samples, as torch's ``collate_fn`` does.
Collate = Callable[[list[Any]], Any]


class MapStyle(Protocol):
    """``(input, label)`` pairs by number; each is an array, or a tuple or dictionary of arrays.

    ``(input, label, weight, ...)`` has a label of several parts.  Strings, None and other objects
    that are no numbers are left out.
    """

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
        collate: makes the arrays of a micro-batch, whose shapes may be others each time; None:
            samples are alike, and stacked.
    """

    data: MapStyle
    dtype: DTypeLike
    seed: int = 0
    epoch: int = -1
    classes: int = 0
    collate: Collate | None = None

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
            every = range(len(self))
            indices = [*every[which]] if isinstance(which, slice) else [every[i] for i in which]
        except IndexError as error:
            raise DataError(self._shrunk) from error
        # Without samples, the first one gives the shapes.
        read = indices or [0]
        if (whole := self._at_once(read)) is not None:
            inputs, labels = map(joined, self._arrays_of(_sample(read[0]), whole))
            return Samples(inputs[: len(indices)], labels[: len(indices)])
        with kept_generators():
            found = ((i, self._read(i) if indices else self.first()) for i in read)
            if self.collate is not None:
                inputs, labels = self._collated(self.collate, read, [one for _, one in found])
            else:  # at once, as a data set may use one buffer for all samples
                pairs = [self._arrays_of(_sample(index), one) for index, one in found]
                inputs, labels = (
                    self._stacked(read, what, values)
                    for what, values in zip(
                        ("input", "label"), zip(*pairs, strict=True), strict=True
                    )
                )
        return Samples(inputs[: len(indices)], labels[: len(indices)])

    def _at_once(self, rows: list[int]) -> Any:
        """Samples that are rows of tensors, which nothing draws; None: they may be others."""
        data, torch = cast(Any, self.data), sys.modules.get("torch")
        if torch is None or self.collate is not None:
            return None
        utils: Any = torch.utils.data
        with suppress(IndexError):
            while type(data) is utils.Subset:
                rows, data = [int(data.indices[row]) for row in rows], data.dataset
            return data[rows] if type(data) is utils.TensorDataset else None

    def first(self) -> Any:
        """A sample with the shapes of all, as the data set gives it."""
        with kept_generators():
            return self._read(0)

    def outline(self) -> tuple[list[str], bool, bool]:
        """Look at the first sample.

        Returns:
            Its parts that are no numbers; whether its label has parts in turn, as in (input, label,
            weight); and whether ``collate`` draws random numbers, which follow the ranks' layout.
        """
        what, found, draws = _sample(0), self.first(), False
        if self.collate is not None:
            with seeded(self.seed, 3):
                before = random_states()
                found = self._batch(self.collate, what, [found])
                draws = random_states() != before
        left_out = [
            f"{f'{key!r} of ' if key != '' else ''}the {of} ({type(part).__name__})"
            for of, value in zip(("input", "label"), self._pair(what, found), strict=True)
            for key, part in self._entries(value)
            if self._array(what, part) is None
        ]
        in_turn = _is_followed(found) and "" not in self._arrays_of(what, found)[1]
        return left_out, in_turn, draws

    def _read(self, index: int) -> Any:
        seed_generators(self.seed, 1, self.epoch + 1, index)
        try:
            return self.data[index]
        except (Exception, SystemExit) as error:  # or the other ranks would wait
            if isinstance(error, IndexError) and len(self) <= index:
                raise DataError(self._shrunk) from error
            raise self._wrong(_sample(index), f" cannot be read: {words(error)}") from error

    @property
    def _shrunk(self) -> str:
        return (
            f"{type(self.data).__name__} has {len(self)} samples now, and had more when the run "
            "began; its length must stay as it is"
        )

    def _wrong(self, what: str, why: str) -> DataError:
        return DataError(f"{what} of {type(self.data).__name__}{why}")

    def _collated(
        self, collate: Collate, indices: Sequence[int], found: list[Any]
    ) -> tuple[Array, Array]:
        """The arrays that ``collate`` makes of these samples."""
        what = f"the batch of samples {', '.join(map(str, indices[:4]))}"
        what += ", ..." if len(indices) > 4 else ""
        with seeded(self.seed, 3, self.epoch + 1, indices[0], len(indices)):
            pair = self._arrays_of(what, self._batch(collate, what, found))
        for parts in pair:
            for name, array in parts.items():
                if array.shape[:1] != (len(indices),):
                    of = f"{name!r} of " if name else ""
                    raise self._wrong(
                        what,
                        f": collate_fn gives {of}shape {array.shape}; the first axis must be the "
                        f"{len(indices)} samples",
                    )
        return joined(pair[0]), joined(pair[1])

    def _batch(self, collate: Collate, what: str, found: list[Any]) -> Any:
        try:
            return collate(found)
        except (Exception, SystemExit) as error:
            raise self._wrong(what, f": collate_fn: {words(error)}") from error

    def _pair(self, what: str, found: Any) -> tuple[Any, Any]:
        """Input and label; what follows the label is a part of it.

        A dictionary is an input as a whole, for a model that computes its own loss.
        """
        if isinstance(found, Mapping):
            return found, found.get("labels", False)
        if isinstance(found, (tuple, list)) and len(found) >= 2:
            return found[0], found[1] if len(found) == 2 else tuple(found[1:])
        several = isinstance(found, (tuple, list))
        raise self._wrong(
            what,
            f" is a {type(found).__name__}{f' of {len(found)}' if several else ''}; a pair is "
            "needed, (input, label), each of which may be a tuple or a dictionary, or "
            "(input, label, weight); collate_fn= may make one of a batch, and "
            "list(zip(inputs, labels)) makes them of two arrays",
        )

    def _arrays_of(self, what: str, found: Any) -> Pair:
        """Input and label of a sample, or of the batch ``what`` that was collated."""
        inputs, labels = (self._arrays(what, value) for value in self._pair(what, found))
        if _is_followed(found) and len(labels) == 1:  # nothing but names and the like follows it
            labels = {"": labels["0"]}
        return inputs, labels

    def _arrays(self, what: str, value: Any) -> Named:
        """Arrays of an input or a label by name, without what is no number."""
        found = {key: self._array(what, part) for key, part in self._entries(value)}
        kept = {key: array for key, array in found.items() if array is not None}
        if not kept:
            raise self._wrong(what, f" holds no numbers in a {type(value).__name__}")
        if isinstance(value, (tuple, list)) and "" not in kept:
            if list(kept) != list(range(len(kept))):
                raise self._wrong(
                    what,
                    " has what is no number before numbers in a tuple, and is not passed on; put "
                    "it behind them, or give a dictionary",
                )
            return {str(number): array for number, array in kept.items()}
        try:
            return named(kept) if isinstance(value, Mapping) else kept
        except ValueError as error:
            raise self._wrong(what, f": {error}") from error

    def _entries(self, value: Any) -> Iterable[tuple[Any, Any]]:
        """The parts of an input or a label, by key or number; a single one has the key "".

        A batch may be a list of tensors where a sample is a tuple, as torch's ``default_collate``
        gives it.
        """
        if isinstance(value, Mapping):
            return value.items()
        is_several = self.collate is not None and isinstance(value, list)
        is_several = is_several and all(hasattr(part, "shape") for part in value)
        return enumerate(value) if is_several or isinstance(value, tuple) else [("", value)]

    def _array(self, what: str, value: Any) -> Array | None:
        """The array of numbers, or None of strings, dates and other objects."""
        if value is None or isinstance(value, (str, bytes)):
            return None
        try:
            found = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # on a GPU, or with a gradient
            raise self._wrong(
                what, f" holds a {type(value).__name__} that is no array: {error}"
            ) from error
        if not found.size:
            raise self._wrong(what, " holds an empty array")
        if is_floating(found.dtype):
            return found.astype(self.dtype)
        if found.dtype.kind in "iub":
            return found
        if found.dtype.kind in "USMm" and hasattr(value, "dtype"):  # an array of texts or dates
            return None
        if found.dtype.kind == "c" or _has_numbers(value):
            raise self._wrong(
                what,
                f" holds a {type(value).__name__} of {found.dtype}; inputs and labels are arrays "
                "of real numbers, or one tuple or dictionary of them",
            )
        return None

    def _stacked(self, indices: Sequence[int], what: str, values: Sequence[Named]) -> Array:
        first = values[0]
        for index, value in zip(indices, values, strict=True):
            if _kinds(value) != _kinds(first):
                raise DataError(
                    f"the {what} of sample {index} of {type(self.data).__name__} is "
                    f"{_shown(value)}, and that of sample {indices[0]} {_shown(first)}; all must "
                    "be alike, or collate_fn= must make batches of them, as by padding"
                )
        return joined({name: np.stack([value[name] for value in values]) for name in first})


def _sample(index: int) -> str:
    return f"sample {index}"


def _is_followed(found: Any) -> bool:
    """Whether something follows input and label, as a weight."""
    return not isinstance(found, Mapping) and len(found) > 2


def _has_numbers(value: Any) -> bool:
    """Whether there are numbers somewhere within an object."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(map(_has_numbers, value))
    return isinstance(value, (int, float)) or hasattr(value, "dtype")


def _kinds(value: Named) -> list[tuple[str, Any, Shape]]:
    return [(name, array.dtype, array.shape) for name, array in value.items()]


def _shown(value: Named) -> str:
    return ", ".join(
        f"{name and f'{name!r}: '}{kind} of shape {shape}" for name, kind, shape in _kinds(value)
    )
