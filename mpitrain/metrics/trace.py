"""Timeline of the ranks on one clock, for Perfetto or chrome://tracing."""

import json
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import msgspec
from mpi4py import MPI
from msgspec import Meta, Struct

from collectives.clocks import ahead
from collectives.files import read_regular, replace
from mpitrain.config import ConfigError

#: The file's name in a run's folder.
TRACE_FILE = "trace.json"
#: Spans that a rank keeps, the last ones.
_MOST = 200_000
#: Largest time in a file: thirty years.
_LONGEST_US = 1e15


class Span(NamedTuple):
    """Activity of a rank.

    Attributes:
        rank: the rank.
        name: name of the activity, as in ``F3``.
        category: ``compute``, ``communicate``, ``wait``, ``update`` or ``checkpoint``.
        start, stop: seconds since the trace began, on rank 0's clock.
        arguments: micro-batch, chunk and the like; whole numbers.
    """

    rank: int
    name: str
    category: str
    start: float
    stop: float
    arguments: dict[str, int]


class Trace:
    """Recorder of one rank's spans; it costs next to nothing if it is not enabled."""

    def __init__(self, rank: int, *, enabled: bool = True) -> None:
        self._rank = rank
        self._enabled = enabled
        self._spans: deque[Span] = deque(maxlen=_MOST)
        self._zero = perf_counter()

    def span(self, name: str, category: str, **arguments: int) -> AbstractContextManager[Any]:
        """Context manager that records its duration."""
        return self._span(name, category, arguments) if self._enabled else nullcontext()

    @contextmanager
    def _span(self, name: str, category: str, arguments: dict[str, int]) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            stop = perf_counter()
            self._spans.append(
                Span(self._rank, name, category, start - self._zero, stop - self._zero, arguments)
            )

    def align(self, comm: MPI.Intracomm) -> None:
        """Sets the clocks of all ranks to rank 0's; collective.

        Ranks on its machine share the clock; others measure round trips and take the shortest.
        """
        self._zero = comm.bcast(perf_counter()) + ahead(comm)

    @contextmanager
    def to_file(
        self, comm: MPI.Intracomm, path: Path, *ends: type[BaseException]
    ) -> Iterator[None]:
        """Context manager that writes its spans at its end; collective.

        It does so, too, after the exceptions ``ends``, which all ranks raise.
        """
        if not self._enabled:
            yield
            return
        self.align(comm)
        try:
            yield
        except ends:
            try:
                self.write(comm, path)
            except ConfigError as error:  # the reason of the end, and its status, matter more
                if comm.rank == 0:
                    print(f"mpitrain: {error}", file=sys.stderr)
            raise
        self.write(comm, path)

    def write(self, comm: MPI.Intracomm, path: Path) -> None:
        """Writes all ranks' spans as one Chrome trace, a thread for each rank; collective.

        ConfigError on all ranks: the file cannot be written.
        """
        gathered = comm.gather(list(self._spans))
        why = ""
        if gathered is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace(path, json.dumps(chrome([span for own in gathered for span in own])))
            except OSError as error:
                why = f"{path} cannot be written: {error.strerror}"
        if why := comm.bcast(why):
            raise ConfigError(f"{why}; make room or set run.trace = false; all else is written")


class _Complete(Struct, tag="X", tag_field="ph"):
    """A span in the file."""

    tid: Annotated[int, Meta(ge=0)]
    name: str
    cat: str
    ts: Annotated[float, Meta(ge=-_LONGEST_US, le=_LONGEST_US)]
    dur: Annotated[float, Meta(ge=0, le=_LONGEST_US)]
    args: dict[str, int]
    pid: int = 0


class _Metadata(Struct, tag="M", tag_field="ph"):
    """Name of a row in the file."""

    tid: int = 0
    args: dict[str, str] = {}
    name: str = "thread_name"
    pid: int = 0


class _File(Struct):
    traceEvents: list[_Complete | _Metadata]
    displayTimeUnit: str = "ms"


def chrome(spans: list[Span]) -> dict[str, Any]:
    """Chrome trace of spans, in microseconds."""
    names = [
        _Metadata(rank, {"name": f"rank {rank}"}) for rank in sorted({span.rank for span in spans})
    ]
    events = [
        _Complete(
            rank, name, kind, round(1e6 * start, 3), round(1e6 * (stop - start), 3), arguments
        )
        for rank, name, kind, start, stop, arguments in spans
    ]
    found: dict[str, Any] = msgspec.to_builtins(_File([*names, *events]))
    return found


def read_trace(path: Path) -> list[Span]:
    """Spans of a file of :meth:`Trace.write`; ``ValueError`` if it is none or cannot be read."""
    try:
        file = msgspec.json.decode(read_regular(path), type=_File)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not a trace of mpitrain: {error}") from error
    return [
        Span(one.tid, one.name, one.cat, one.ts / 1e6, (one.ts + one.dur) / 1e6, one.args)
        for one in file.traceEvents
        if isinstance(one, _Complete)
    ]


def remove_trace(folder: Path) -> None:
    """Removes an earlier run's trace from a run's folder; ``ConfigError`` if that fails."""
    path = folder / TRACE_FILE
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be replaced ({error.strerror}); remove it or choose another run.dir"
        ) from error
