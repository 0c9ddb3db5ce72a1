"""A program's data set that is read in turn: an iterable of known length, as torch's are."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from collectives.errors import words
from mpitrain.data.dataset import DataError
from mpitrain.data.generators import begin_epoch, seeded
from mpitrain.data.map_style import OwnSamples
from mpitrain.data.places import StreamPlace, state_in, text_of

#: Samples behind a state, by which it is tried.
_FEW = 2
#: Writes a place whose state was taken before.
WritePlace = Callable[[], StreamPlace]
#: An iterable of samples, or a function that returns one.
Source = Iterable[Any] | Callable[[], Iterable[Any]]

#: Attributes of a source that its stream has, too.
_TAKEN_OVER = (
    "set_epoch", "starting_at", "batch_sampler", "generator", "sampler", "dataset", "state_dict",
    "load_state_dict",
)  # fmt: skip
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

    def __copy__(self) -> "Stream":
        return Stream(_apart(self.source), self._samples)

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


def _apart(data: Any) -> Any:
    """A copy with its own attributes; ``datasets`` gives its copies those of the copied."""
    found = copy(data)
    if hasattr(found, "__dict__"):
        found.__dict__ = dict(vars(found))
    return found


def _keeps_state(data: Any) -> bool:
    return hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


@contextmanager
def _of_state(name: str) -> Iterator[None]:
    """Context that raises DataError where the ``state_dict`` of that class fails."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise DataError(f"{name}.state_dict: {words(error)}") from error


def _written(name: str, epoch: int, position: int, state: Any, following: str) -> StreamPlace:
    with _of_state(name):
        return StreamPlace(epoch, position, text_of(state), following)


@dataclass
class _Cursor:
    """Position of a pass over a stream: the epoch and number of the next sample.

    Attributes:
        stateful: iterator or iterable that gives the state of the pass; None: neither does.
        kept: place in a pass where a run goes on; None: at its beginning.
        ahead: next samples, which the iterator has given already.
        place: writes the place before them.
        process: process that made the iterator, whose open files others must not use.
        first: a list of the first sample, once it was read.
    """

    iterator: Iterator[Any] | None = None
    stateful: Any = None
    kept: StreamPlace | None = None
    ahead: list[Any] = field(default_factory=list)
    place: WritePlace | None = None
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
        states: whether a run that goes on loads the ``state_dict`` of the stream or its iterator.
    """

    cursor: _Cursor = field(default_factory=_Cursor, compare=False)
    states: bool = False

    def first(self) -> Any:
        if not self.cursor.first:
            self._read(0)
        return self.cursor.first[0]

    def with_states(self) -> tuple["Streamed", str]:
        """These samples, with states if one is right near the beginning; why it is not, or "".

        Raises:
            DataError: a pass is not what it was before a state was loaded.
        """
        one = replace(self, cursor=_Cursor(), states=True, epoch=0)
        one._begin(0)
        if hasattr(self.data, "starting_at") or not (one.cursor.stateful and len(self) > 2 * _FEW):
            return self, ""
        first = one._following()
        one._next(_FEW - 1)
        try:
            write = one.place()
            other = replace(one, cursor=_Cursor(kept=write() if write else None))
            other._next(_FEW)
            why = "" if other.cursor.kept else "other samples follow"
        except DataError as error:
            why = str(error)
        one._begin(0)
        if one._following() != first:
            raise DataError(
                f"{type(self.data).__name__} does not begin anew once its load_state_dict was "
                "called; let each iter() go by the state of the object that it is called of, or "
                "leave load_state_dict out"
            )
        return (self if why else replace(self, states=True)), why

    def place(self) -> WritePlace | None:
        """Where the pass of this process is; None without one, near its end, or without states.

        It reads the samples that follow, by which a run that goes on sees whether its state is
        right; the pass has them next.  The state is copied, and only the function that is returned
        writes it, which takes some 100 times as long; DataError: it has what is not kept.

        Raises:
            DataError: they cannot be read, or the stream does not give its state.
        """
        at, name = self.cursor, type(self.data).__name__
        here = at.stateful is not None and at.process == os.getpid() and at.epoch >= 0
        if not (self.states and here and at.position + _FEW < len(self)):
            return None
        if not at.ahead:  # else the state is that behind them
            with _of_state(name):
                state = deepcopy(at.stateful.state_dict())
            following = replace(self, epoch=at.epoch)._following()
            at.place = partial(_written, name, at.epoch, at.position, state, following)
        return at.place

    def _following(self) -> str:
        """Digest of the next samples, which are kept for the pass."""
        at, what = self.cursor, "what follows"
        start = at.position
        # A data set may use one buffer for all samples.
        found = [deepcopy(self._next(start + number)) for number in range(_FEW)]
        at.position, at.ahead = start, found
        with seeded(self.seed, 3):
            made = found if self.collate is None else [self._batch(self.collate, what, found)]
        parts = [part for one in made for part in self._arrays_of(what, one)]
        bytes_ = b"".join(array.tobytes() for part in parts for array in part.values())
        return hashlib.blake2b(bytes_, digest_size=16).hexdigest()

    def go_on(self, place: StreamPlace) -> None:
        """Let the pass of that epoch begin at this place."""
        self.cursor.kept = place

    def _read(self, index: int) -> Any:
        if index == 0 and self.epoch < 0 and self.cursor.first:
            return self.first()  # for its shapes
        found = self._next(index)
        if index == 0:
            self.cursor.first[:] = [found]
        return found

    def _next(self, index: int) -> Any:
        """Sample of this number."""
        at, name = self.cursor, type(self.data).__name__
        here = at.iterator is not None and (at.epoch, at.process) == (self.epoch, os.getpid())
        if not here or index < at.position:
            self._begin(0)
        kept = at.kept if self.states else None
        if index > at.position and hasattr(self.data, "starting_at"):
            self._begin(index)
        elif kept and kept.epoch == self.epoch and at.position < kept.position <= index:
            self._begin(kept.position, kept)
            if self._following() == kept.following:
                at.place = lambda: kept
            else:  # as behind a buffer that shuffles, which the state has not
                at.kept = None
                self._begin(0)
        found: Any = None
        while at.position <= index:
            number, at.position = at.position, at.position + 1
            if at.ahead:
                found = at.ahead.pop(0)
                continue
            with seeded(self.seed, 1, self.epoch + 1, number):
                try:
                    assert at.iterator is not None
                    found = next(at.iterator)
                except StopIteration:
                    at.iterator = at.stateful = None
                    raise DataError(
                        f"{name} ends after {number} samples, and its length is {len(self)}; they "
                        "must agree"
                    ) from None
                except (Exception, SystemExit) as error:
                    at.iterator = at.stateful = None
                    why = f" cannot be read: {words(error)}"
                    raise self._wrong(f"sample {number}", why) from error
        if at.position == len(self):
            self._expect_end()
        return found

    def _begin(self, index: int, kept: StreamPlace | None = None) -> None:
        at, data = self.cursor, cast(Any, self.data)
        at.iterator = at.stateful = at.place = None
        at.ahead.clear()
        try:
            with seeded(self.seed, 2, self.epoch + 1):
                # A pass of its own object, so that no state is left in the next one.
                data = _apart(data) if self.states and _keeps_state(data) else data
                begin_epoch(data, max(0, self.epoch))
                if kept and _keeps_state(data):
                    data.load_state_dict(state_in(kept.state))
                given: Any = data.starting_at(index) if index and not kept else data
                iterator: Any = iter(given)
                if kept and not _keeps_state(data):
                    iterator.load_state_dict(state_in(kept.state))
        except (Exception, SystemExit) as error:
            raise DataError(f"{type(data).__name__} cannot be begun: {words(error)}") from error
        if iterator is data:
            raise DataError(f"{type(data).__name__}: {_ONCE}")
        at.stateful = next(filter(_keeps_state, (data, iterator)), None)
        at.iterator, at.position = iterator, index
        at.epoch, at.process = self.epoch, os.getpid()

    def _expect_end(self) -> None:
        """Raises DataError if the stream has more samples than its length."""
        at = self.cursor
        iterator, at.iterator, at.stateful = at.iterator, None, None
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
