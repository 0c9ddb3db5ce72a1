"""Plans and requests of collectives that the MPI library carries out."""

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
from mpi4py import MPI

from collectives.calls.arguments import Arguments
from collectives.calls.mpi4py_spec import free_types
from collectives.execution.plan import Action
from collectives.execution.progress import Progress

if TYPE_CHECKING:
    from collectives.failure.watched_plan import WatchedPlan


class Native(NamedTuple):
    """Stands for the plan of a call that the MPI library carries out; keeps no buffer alive."""

    reason: str
    algorithm: str = "native"


class NativePlan:
    """A plan by the MPI library's own collective; mpi4py reads the buffers.

    Its methods, and their errors, are those of :class:`~collectives.execution.plan.Plan`.
    """

    algorithm = "native"

    def __init__(
        self,
        comm: MPI.Intracomm,
        arguments: Arguments,
        reason: str,
        progress: Progress | None = None,
        before: Action | None = None,
        least_bytes: int = 0,
    ) -> None:
        """``before`` is done first in each run; plans in ``progress`` move along meanwhile, and its
        traffic counts ``least_bytes`` a run."""
        self.collective = arguments.collective
        self.reason = reason
        self._progress = progress or Progress()
        self._traffic = self._progress.traffic
        self._before = before
        self._least_bytes = least_bytes
        name = arguments.method
        types: dict[int, MPI.Datatype] = {}
        if arguments.recvcounts is not None:
            arguments = arguments._replace(recvcounts=tuple(arguments.recvcounts))
        given = [_as_it_is_now(one, types) for one in arguments.for_mpi4py]
        if types:
            weakref.finalize(self, free_types, types.values()).atexit = False
        self._run = partial(getattr(MPI.Intracomm, name), comm, *given)
        self._start = partial(getattr(MPI.Intracomm, f"I{name.lower()}"), comm, *given)
        self._request = self._of(MPI.REQUEST_NULL)
        self._freed = False

    def _of(self, request: MPI.Request, buffers: Any = None) -> "NativeRequest":
        return NativeRequest(request, self.collective, self.reason, self._progress, buffers)

    def __call__(self) -> None:
        """Runs the collective to its end, on all ranks in this way: MPI's blocking collectives
        match none of its nonblocking ones."""
        self._expect_idle("run")
        # Another rank may wait for one of these before it comes here.
        self._progress.drain()
        self._enter()
        self._run()

    def Start(self) -> None:
        self._expect_idle("started")
        self._enter()
        self._request = self._of(self._start())

    def begin(self) -> "NativeRequest":
        self._expect_idle("started")
        self._enter()
        begun = self._of(self._start(), self._start.args)
        self.Free()
        return begun

    def Test(self) -> bool:
        return self._request.Test()

    def Wait(self, status: object = None) -> None:
        self._request.Wait()

    synchronize = Wait  # the library queues nothing

    def Free(self) -> None:
        self._expect_ended("Wait for it before Free")
        self._run = self._start = None  # type: ignore[assignment]
        self._freed = True

    def _expect_idle(self, what: str) -> None:
        if self._freed:
            raise RuntimeError(f"{self!r} was freed; make another one")
        self._expect_ended(f"it cannot be {what} again without Wait or a true Test")

    def _enter(self) -> None:
        """A run begins."""
        self._progress.expect_rank()
        if self._traffic is not None:
            self._traffic.leave(self._least_bytes)
        if self._before is not None:
            self._before()

    def _expect_ended(self, instead: str) -> None:
        if self._request != MPI.REQUEST_NULL:
            raise RuntimeError(f"{self!r} is under way; {instead}")

    def __repr__(self) -> str:
        return f"<NativePlan: {self.collective}>"


class NativeRequest(MPI.Request):
    """The library's own request, so that ``MPI.Request.Waitall`` and the like take it with others;
    and a plan for one run, whose ``Wait`` moves this thread's other plans along, and whose ``Free``
    does nothing, as it has no second run.

    Attributes:
        watched: sees its waits, if there is a watchdog.
    """

    algorithm = "native"
    collective: str
    reason: str
    watched: "WatchedPlan | None" = None
    _progress: Progress
    _buffers: Any

    def __new__(
        cls, request: MPI.Request, collective: str, reason: str, progress: Progress, buffers: Any
    ) -> Self:
        """``buffers`` are kept until it has ended, which mpi4py's requests do not do."""
        self = super().__new__(cls, request)
        self.collective = collective
        self.reason = reason
        self._progress = progress
        self._buffers = buffers
        return self

    def Test(self, status: MPI.Status | None = None) -> bool:
        done = super().Test(status)
        if done:
            self._buffers = None
        if self.watched is not None:
            self.watched.tested(done)
        return done

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        if self.watched is None:
            self._wait(status)
        else:
            with self.watched.waiting("Wait for"):
                self._wait(status)
        self._buffers = None
        return True

    def _wait(self, status: MPI.Status | None) -> None:
        while self._progress.here:
            if super().Test(status):
                return
            self._progress.advance()
        super().Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        return self.Test(status), None

    def wait(self, status: MPI.Status | None = None) -> None:
        self.Wait(status)

    def synchronize(self) -> None:
        self.Wait()

    def Start(self) -> None:
        raise RuntimeError(f"{self!r} was started, and is for one run; make another one")

    def Free(self) -> None:
        if self != MPI.REQUEST_NULL:
            raise RuntimeError(f"{self!r} is under way; Wait for it before Free")

    def __repr__(self) -> str:
        return f"<NativeRequest: {self.collective}>"


def _as_it_is_now(spec: Any, types: dict[int, MPI.Datatype]) -> Any:
    """A specification that the caller's changes to it do not reach, as MPI reads it once.

    Duplicates of the caller's own types, which may be freed, are added to ``types``, by handle.
    """
    if type(spec) not in (list, tuple) or not spec:
        return spec
    memory, *words = spec
    return type(spec)([memory, *(_word(word, types) for word in words)])


def _word(word: Any, types: dict[int, MPI.Datatype]) -> Any:
    """A type, a count, or the counts and displacements of blocks in a specification.  Arrays
    become lists; a tuple stays one, as a tuple of two means something else."""
    if isinstance(word, MPI.Datatype):
        if word == MPI.DATATYPE_NULL or word.is_predefined:
            return word
        if word.handle not in types:
            types[word.handle] = word.Dup()
        return types[word.handle]
    if isinstance(word, str) or not np.iterable(word):
        return word
    return (tuple if type(word) is tuple else list)(_word(each, types) for each in word)
