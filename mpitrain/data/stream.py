"""A data set of one's own that is read in turn: an iterable of known length, as torch's are."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mpitrain.data.errors import DataError
from mpitrain.data.own import Own, Pair, seeded

#: What gives samples in turn, or a function that gives such.
Source = Iterable[Any] | Callable[[], Iterable[Any]]

_ONCE = (
    "it can be read once, and each epoch reads it; give an iterable that begins anew, or "
    "mpitrain.Stream(function, samples)"
)


class Stream:
    """So many samples, in the order in which an iterable gives them.

    data = Stream(lambda: map(parsed, open("samples.jsonl")), 10_000)
    """

    def __init__(self, source: Source, samples: int) -> None:
        """Nothing is read yet.

        Args:
            source: an iterable, or a function that gives one; it is begun anew in each epoch.
            samples: as many as each pass over it gives.
        """
        self.source = source
        self._samples = samples
        for name in ("set_epoch", "starting_at", "batch_sampler", "generator", "sampler"):
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[Any]:
        source: Any = self.source
        iterator = iter(source() if callable(source) else source)
        if iterator is source:
            raise TypeError(_ONCE)
        return iterator


def is_stream(data: Any) -> bool:
    """Whether it gives samples in turn, and not by number."""
    torch = sys.modules.get("torch")
    if torch and isinstance(data, torch.utils.data.IterableDataset):
        return True
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


@dataclass
class _Cursor:
    """Where a pass over a stream is.

    Attributes:
        iterator: gives the next sample; None: there is no pass under way.
        epoch, position: of that sample.
        process: that made the iterator, whose files others must not go on with.
        first: the first sample as it is, in a list, once it was read.
    """

    iterator: Iterator[Any] | None = None
    epoch: int = -1
    position: int = 0
    process: int = 0
    first: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Streamed(Own):
    """Samples of a stream, each where a pass over it comes by it.

    A pass goes from one sample that is asked for to the next, and what lies between is read and
    dropped; a stream with ``starting_at(number)``, which gives an iterable from that sample on,
    is asked for it instead.  A number that lies behind begins a new pass.  While a sample is read,
    dropped ones included, generators are seeded by its number, as of :class:`Own`; while the pass
    is begun, by the epoch, and so are the generators that a DataLoader or its sampler has of its
    own.  ``set_epoch(epoch)`` is called before, where the stream has it.
    """

    cursor: _Cursor = field(default_factory=_Cursor, compare=False)

    def first(self) -> Pair:
        if not self.cursor.first:
            self._read(0)
        return self._arrays_of(0, self.cursor.first[0])

    def _read(self, index: int) -> Pair:
        if index == 0 and self.epoch < 0 and self.cursor.first:
            return self.first()  # it is asked for its shapes now and then
        found = self._next(index)
        if index == 0:
            self.cursor.first[:] = [found]
        return self._arrays_of(index, found)

    def _next(self, index: int) -> Any:
        """The sample of this number."""
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
                    raise DataError(
                        f"sample {number} of {name} cannot be read: {type(error).__name__}: {error}"
                    ) from error
        if at.position == len(self):
            self._expect_end()
        return found

    def _begin(self, index: int) -> None:
        at, data = self.cursor, self.data
        try:
            with seeded(self.seed, 2, self.epoch + 1):
                _seed_own_generators(data)
                if hasattr(data, "set_epoch"):
                    data.set_epoch(max(0, self.epoch))
                given: Any = data.starting_at(index) if index else data  # type: ignore[attr-defined]
                iterator = iter(given)
        except (Exception, SystemExit) as error:
            raise DataError(
                f"{type(data).__name__} cannot be begun: {type(error).__name__}: {error}"
            ) from error
        if iterator is data:
            raise DataError(f"{type(data).__name__}: {_ONCE}")
        at.iterator, at.position = iterator, index
        at.epoch, at.process = self.epoch, os.getpid()

    def _expect_end(self) -> None:
        """After the last sample: others would never be trained on."""
        at = self.cursor
        iterator, at.iterator = at.iterator, None
        assert iterator is not None
        with seeded(self.seed, 1, self.epoch + 1, len(self)):
            try:
                more = next(iterator, self) is not self
            except (Exception, SystemExit):  # of a sample that nobody has asked for
                more = False
        if more:
            raise DataError(
                f"{type(self.data).__name__} has more samples than its length says, {len(self)}; "
                "they must agree"
            )


def _seed_own_generators(data: Any) -> None:
    """Those of a DataLoader and of its sampler: else they would go on from pass to pass, and a run
    that is resumed, or a rank that has begun more passes, would read in another order."""
    for owner in (data, getattr(data, "sampler", None)):
        if seed := getattr(getattr(owner, "generator", None), "manual_seed", None):
            seed(sys.modules["torch"].initial_seed())
