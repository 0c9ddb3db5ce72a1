"""What each rank did when, on one clock, for Perfetto or chrome://tracing."""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import msgspec
from mpi4py import MPI
from msgspec import Meta, Struct

from mpitrain.config import ConfigError
from mpitrain.files import check_regular

#: The file's name in a run's folder.
TRACE_FILE = "trace.json"
#: Round trips to a rank of another machine.
_TRIPS = 8
#: Thirty years: what a file says beyond is no time of a run.
_LONGEST_US = 1e15


class Span(NamedTuple):
    """Something a rank did.

    Attributes:
        rank: who.
        name: what, as in ``F3``.
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
    """Records spans of one rank; one that is not enabled costs next to nothing."""

    def __init__(self, rank: int, *, enabled: bool = True, most: int = 200_000) -> None:
        """``most``: spans that are kept, the last ones."""
        self._rank = rank
        self._enabled = enabled
        self._spans: deque[Span] = deque(maxlen=most)
        self._zero = perf_counter()

    def span(self, name: str, category: str, **arguments: int) -> AbstractContextManager[Any]:
        """Record what happens in a ``with`` statement."""
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
        """Set the clocks of all ranks to rank 0's; collective.

        Ranks of its machine have the same clock; others go by the shortest of some round trips.
        """
        zero = comm.bcast(perf_counter())
        clocks = comm.allgather(_clock())
        ahead = 0.0
        for rank, clock in enumerate(clocks):
            if clock == clocks[0]:
                continue
            if comm.rank == 0:
                for _ in range(_TRIPS):
                    comm.recv(source=rank)
                    comm.send(perf_counter(), rank)
            elif comm.rank == rank:
                ahead = min(self._trip(comm) for _ in range(_TRIPS))[1]
        self._zero = zero + ahead

    def _trip(self, comm: MPI.Intracomm) -> tuple[float, float]:
        """(seconds there and back, our clock minus rank 0's)"""
        there = perf_counter()
        comm.send(None, 0)
        theirs = comm.recv(source=0)
        back = perf_counter()
        return back - there, (there + back) / 2 - theirs

    @contextmanager
    def to_file(
        self, comm: MPI.Intracomm, path: Path, *ends: type[BaseException]
    ) -> Iterator[None]:
        """Write what is done in a ``with`` statement; collective, and nothing if not enabled.

        Args:
            comm: the ranks.
            path: of the file, as :meth:`write` takes it.
            ends: exceptions of all ranks after which the trace is written, too.
        """
        if not self._enabled:
            yield
            return
        self.align(comm)
        try:
            yield
        except ends:
            self.write(comm, path)
            raise
        self.write(comm, path)

    def write(self, comm: MPI.Intracomm, path: Path) -> None:
        """All ranks' spans as one Chrome trace, a thread for each rank; collective."""
        gathered = comm.gather(list(self._spans))
        if gathered is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(chrome([s for own in gathered for s in own])))


def chrome(spans: list[Span]) -> dict[str, Any]:
    """The Chrome trace of spans, in microseconds."""
    names = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": 0,
            "tid": rank,
            "args": {"name": f"rank {rank}"},
        }
        for rank in sorted({span.rank for span in spans})
    ]
    events = [
        {
            "name": span.name,
            "cat": span.category,
            "ph": "X",
            "pid": 0,
            "tid": span.rank,
            "ts": round(1e6 * span.start, 3),
            "dur": round(1e6 * (span.stop - span.start), 3),
            "args": span.arguments,
        }
        for span in spans
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


class _Complete(Struct, tag="X", tag_field="ph"):
    """A span in the file."""

    tid: Annotated[int, Meta(ge=0)]
    name: str
    cat: str
    ts: Annotated[float, Meta(ge=-_LONGEST_US, le=_LONGEST_US)]
    dur: Annotated[float, Meta(ge=0, le=_LONGEST_US)]
    args: dict[str, int]


class _Metadata(Struct, tag="M", tag_field="ph"):
    """The name of a row in the file."""


class _File(Struct):
    traceEvents: list[_Complete | _Metadata]


def read_trace(path: Path) -> list[Span]:
    """The spans of a file that :meth:`Trace.write` wrote.

    Raises:
        ValueError: it is not one, or it cannot be read.
    """
    try:
        check_regular(path)
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not a trace of mpitrain: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a trace of mpitrain: {error}") from error
    return [
        Span(
            event.tid,
            event.name,
            event.cat,
            event.ts / 1e6,
            (event.ts + event.dur) / 1e6,
            event.args,
        )
        for event in file.traceEvents
        if isinstance(event, _Complete)
    ]


def remove_trace(folder: Path) -> None:
    """Remove an earlier run's trace from a run's folder, so that none is taken for this run's.

    Raises:
        ConfigError: it cannot be removed.
    """
    path = folder / TRACE_FILE
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be replaced ({error.strerror}); remove it or choose another run.dir"
        ) from error


def _clock() -> str:
    """Whose clock ``perf_counter`` reads: that of the running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()
