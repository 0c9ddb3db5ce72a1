"""A program's data set that is read in turn: an iterable of known length, as torch's are."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

from collectives.errors import words
from mpitrain.data.dataset import DataError
from mpitrain.data.generators import begin_epoch, seeded
from mpitrain.data.map_style import OwnSamples

#: An iterable of samples, or a function that returns one.
Source = Iterable[Any] | Callable[[], Iterable[Any]]

#: Attributes of a source that its stream has, too.
_TAKEN_OVER = ("set_epoch", "starting_at", "batch_sampler", "generator", "sampler", "dataset")
_ONCE = (
    "it can be read once, and each epoch reads it; give an iterable that begins anew, or "
    "mpitrain.Stream(function, samples)"
)


class Stream:
    """A number of samples in the order of an iterable.

    data = Stream(lambda: map(parsed, open("samples.jsonl")), 10_000)
    """

    def __init__(
        self, source: Source, samples: int, *, starting_at: Callable[[int], Any] | None = None
    ) -> None:
        """Reads nothing yet.

        Args:
            source: an iterable, or a function that returns one; it begins anew in each epoch.
            samples: number of samples of each pass.
            starting_at: gives an iterable of the samples from a number on, so that those before
                need not be read; that of ``source``, if it has one.
        """
        self.source = source
        self._samples = samples
        for name in _TAKEN_OVER:
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))
        if starting_at is not None:
            self.starting_at = starting_at

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[Any]:
        source: Any = self.source
        iterator = iter(source() if callable(source) else source)
        if iterator is source:
            raise TypeError(_ONCE)
        return iterator


def is_stream(data: Any) -> bool:
    """Whether data give samples in turn, and not by number."""
    torch = sys.modules.get("torch")
    if torch and isinstance(data, torch.utils.data.IterableDataset):
        return True
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


def _copied(sample: Any) -> Any:
    """A sample that stays, as a source may use one array for all; itself, if it has no copy."""
    try:
        return deepcopy(sample)
    except Exception:  # whatever its objects raise
        return sample


@dataclass
class _Cursor:
    """Position of a pass over a stream: the epoch and number of the next sample.

    Attributes:
        process: process that made the iterator, whose open files others must not use.
        first: a list of a copy of the first sample, once it was read.
    """

    iterator: Iterator[Any] | None = None
    epoch: int = -1
    position: int = 0
    process: int = 0
    first: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Streamed(OwnSamples):
    """Samples of a stream, which a pass reads in turn.

    A pass reads and drops the samples between two wanted ones, unless the stream has
    ``starting_at(number)``, which returns an iterable from that sample on.  A smaller number begins
    a new pass.  Generators are seeded by the number of each sample, as for :class:`OwnSamples`; at
    the beginning of a pass by the epoch (:func:`mpitrain.data.generators.begin_epoch`).

    Attributes:
        cursor: position of the pass.
    """

    cursor: _Cursor = field(default_factory=_Cursor, compare=False)

    def first(self) -> Any:
        if not self.cursor.first:
            self._read(0)
        return _copied(self.cursor.first[0])  # collate_fn may change it

    def _read(self, index: int) -> Any:
        if index == 0 and self.epoch < 0 and self.cursor.first:
            return self.first()  # for its shapes
        found = self._next(index)
        if index == 0:
            self.cursor.first[:] = [_copied(found)]
        return found

    def _next(self, index: int) -> Any:
        """Sample of this number."""
        at, name = self.cursor, type(self.data).__name__
        here = at.iterator is not None and (at.epoch, at.process) == (self.epoch, os.getpid())
        if not here or index < at.position:
            self._begin(0)
        if index > at.position and hasattr(self.data, "starting_at"):
            self._begin(index)
        found: Any = None
        while at.position <= index:
            number, at.position = at.position, at.position + 1
            with seeded(self.seed, 1, self.epoch + 1, number):
                try:
                    assert at.iterator is not None
                    found = next(at.iterator)
                except StopIteration:
                    at.iterator = None
                    raise DataError(
                        f"{name} ends after {number} samples, and its length is {len(self)}; they "
                        "must agree"
                    ) from None
                except (Exception, SystemExit) as error:
                    at.iterator = None
                    why = f" cannot be read: {words(error)}"
                    raise self._wrong(f"sample {number}", why) from error
        if at.position == len(self):
            self._expect_end()
        return found

    def _begin(self, index: int) -> None:
        at, data = self.cursor, cast(Any, self.data)
        at.iterator = None
        try:
            with seeded(self.seed, 2, self.epoch + 1):
                begin_epoch(data, max(0, self.epoch))
                iterator: Any = iter(data.starting_at(index) if index else data)
        except (Exception, SystemExit) as error:
            raise DataError(f"{type(data).__name__} cannot be begun: {words(error)}") from error
        if iterator is data:
            raise DataError(f"{type(data).__name__}: {_ONCE}")
        at.iterator, at.position = iterator, index
        at.epoch, at.process = self.epoch, os.getpid()

    def _expect_end(self) -> None:
        """Raises DataError if the stream has more samples than its length."""
        at = self.cursor
        iterator, at.iterator = at.iterator, None
        assert iterator is not None
        with seeded(self.seed, 1, self.epoch + 1, len(self)):
            try:
                more = next(iterator, self) is not self
            except (Exception, SystemExit):  # nobody wants that sample
                more = False
        if more:
            raise DataError(
                f"{type(self.data).__name__} has more samples than its length says, {len(self)}; "
                "they must agree"
            )
