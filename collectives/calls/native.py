"""The MPI library's own collectives: what they take, where they fail, how they are called."""

import weakref
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.calls.arguments import Arguments
from collectives.calls.buffer_protocols import memory_of
from collectives.calls.call import Call
from collectives.calls.derived_types import free_types
from collectives.calls.library import COUNTABLE, library
from collectives.calls.native_request import NativeRequest
from collectives.errors import InvalidBuffer
from collectives.execution.memory import gpu_of, is_on_device
from collectives.execution.plan import Action
from collectives.execution.progress import Underway
from collectives.execution.transport.cuda_memory import CudaMemory

#: The names of MPI's methods; nonblocking ones begin with an I.
_METHODS = {
    "allreduce": "Allreduce",
    "reduce_scatter": "Reduce_scatter_block",
    "allgather": "Allgather",
    "alltoall": "Alltoall",
    "broadcast": "Bcast",
    "reduce": "Reduce",
    "gather": "Gather",
    "scatter": "Scatter",
    "scan": "Scan",
    "exscan": "Exscan",
    "barrier": "Barrier",
}


def can_be_native(call: Call) -> bool:
    """Whether this MPI has the datatype, can count the items and reach them; the same on all
    ranks, whichever of several types they name for the same bytes.  Its sums of 16 bits are rounded
    with every rank."""
    has_type = call.buffer.datatype is not None and not call.widens
    return has_type and not call.is_on_device and _most(call) <= COUNTABLE


def _most(call: Call) -> int:
    """Of the items that MPI has to count, as many as all ranks know of; moved ones are bytes."""
    size = 1 if call.contract.reduces else call.buffer.items.itemsize
    if call.counts is None:
        return call.count * size
    # No displacement is longer; what only two ranks know is a message's, as it is MPI's.
    return call.known_nbytes // call.buffer.items.itemsize * size


def fault_of_native(call: Call, planned: bool) -> str:
    """Why the MPI library's own call would fail here; empty if it would not.

    ``planned``: it would be the nonblocking or the persistent one.
    """
    if call.counts is None:
        return ""
    if planned and call.collective == "alltoall" and call.send is None:
        # Seen with 5.0.11 on 4 ranks: MPI_Ialltoallv in place gives others' items.
        if library().startswith("Open MPI"):
            return "in place, Open MPI's nonblocking one mixes up unequal blocks"
    elif call.aside and library().startswith("MPICH"):
        # Seen with 5.0.2 from 512 KiB: memcpy brings the rank's own block to the front, on all
        # ranks but 0, whose block lies there.
        first, *counts = call.counts.send
        starts = accumulate(counts, initial=first)
        if any(start < count for start, count in zip(starts, counts, strict=False)):
            return "in place, MPICH copies a block onto itself"
    return ""


def waits_for_device(arguments: Arguments, is_direct: bool) -> Action | None:
    """What the host has to do before the MPI library may use these buffers: wait for a GPU, or
    nothing.

    Args:
        is_direct: whether this MPI is known to take device memory.

    Raises:
        InvalidBuffer: they lie on a GPU, and it is not: MPI would end the process, or send what
            lay there before.
    """
    given = _data(arguments.sendbuf), _data(arguments.recvbuf)
    arrays = [each for each in given if type(each) is not np.ndarray and is_on_device(each)]
    if not arrays:
        return None
    if not is_direct:
        raise InvalidBuffer(
            f"{arguments.collective}: algorithm='native' hands arrays on a GPU to the MPI library, "
            "which must be CUDA-aware; if it is, say so by Communicator(device='direct') or "
            "COLLECTIVES_DEVICE=direct, or else leave the algorithm out"
        )
    memory = CudaMemory(gpu_of(memory_of(arrays[0], False, "send", readonly=True)))
    return memory.wait_for_callers


def _data(spec: Any) -> Any:
    return spec[0] if type(spec) in (list, tuple) and spec else spec


def call_native(comm: MPI.Intracomm, arguments: Arguments) -> None:
    """The MPI library's own collective, once."""
    getattr(MPI.Intracomm, _method(arguments))(comm, *_as_mpi_takes_them(arguments))


class Native(NamedTuple):
    """In the place of a plan, for calls of the MPI library's own: it keeps no buffer alive."""

    reason: str
    algorithm: str = "native"


class NativePlan:
    """The row beside ours, a :class:`~collectives.execution.plan.Plan` to its user; mpi4py reads
    the buffers."""

    algorithm = "native"

    def __init__(
        self,
        comm: MPI.Intracomm,
        arguments: Arguments,
        reason: str,
        underway: Underway | None = None,
        before: Action | None = None,
    ) -> None:
        """``before`` is done first, in each run; what is ``underway`` moves along meanwhile."""
        self.collective = arguments.collective
        self.reason = reason
        self._underway = underway or Underway()
        self._traffic = self._underway.traffic
        self._before = before
        name = _method(arguments)
        types: dict[int, MPI.Datatype] = {}
        if arguments.recvcounts is not None:
            arguments = arguments._replace(recvcounts=tuple(arguments.recvcounts))
        given = [_as_it_is_now(one, types) for one in _as_mpi_takes_them(arguments)]
        if types:
            weakref.finalize(self, free_types, types.values()).atexit = False
        self._run = partial(getattr(MPI.Intracomm, name), comm, *given)
        self._start = partial(getattr(MPI.Intracomm, f"I{name.lower()}"), comm, *given)
        self._request: MPI.Request = MPI.REQUEST_NULL
        self._freed = False

    def __call__(self) -> None:
        """Runs the collective to its end, on all ranks in this way: MPI's blocking collectives
        match none of its nonblocking ones."""
        self._expect_idle("run")
        # Another rank may wait for one of these before it comes here.
        self._underway.drain()
        if self._traffic is not None:
            self._traffic.leave()
        if self._before is not None:
            self._before()
        self._run()

    def Start(self) -> None:
        """Starts it.

        Raises:
            RuntimeError: it was freed, or is under way.
        """
        self._expect_idle("started")
        if self._traffic is not None:
            self._traffic.leave()
        if self._before is not None:
            self._before()
        self._request = self._start()

    def begin(self) -> NativeRequest:
        """Starts it, for one run, and is no use after it."""
        self.Start()
        request, self._request = self._request, MPI.REQUEST_NULL
        buffers = self._start.args
        self.Free()
        return NativeRequest(request, self, self._underway, buffers)

    def Test(self) -> bool:
        """Makes progress; returns whether it has completed."""
        return self._request.Test()

    def Wait(self) -> None:
        """Completes it; plans that this thread has started go on meanwhile."""
        if self._underway.here:
            while not self._request.Test():
                self._underway.progress()
        else:
            self._request.Wait()

    def synchronize(self) -> None:
        """As :meth:`Wait`: of MPI's, nothing is queued."""
        self.Wait()

    def Free(self) -> None:
        """Lets go of the buffers; the plan cannot be used after it.

        Raises:
            RuntimeError: it is under way.
        """
        self._expect_ended("Wait for it before Free")
        self._run = self._start = None  # type: ignore[assignment]
        self._freed = True

    def _expect_idle(self, what: str) -> None:
        if self._freed:
            raise RuntimeError(f"{self!r} was freed; make another one")
        self._expect_ended(f"it cannot be {what} again without Wait or a true Test")

    def _expect_ended(self, instead: str) -> None:
        if self._request != MPI.REQUEST_NULL:
            raise RuntimeError(f"{self!r} is under way; {instead}")

    def __repr__(self) -> str:
        return f"<NativePlan: {self.collective}>"


def _method(arguments: Arguments) -> str:
    name = _METHODS[arguments.collective]
    if arguments.vector or arguments.recvcounts is not None:
        return "Reduce_scatter" if arguments.collective == "reduce_scatter" else f"{name}v"
    return name


def _as_it_is_now(spec: Any, types: dict[int, MPI.Datatype]) -> Any:
    """A specification that the caller's changes to it do not reach, as MPI reads it once.

    Duplicates of the caller's own types, which may be freed, are added to ``types``, by handle.
    """
    if type(spec) not in (list, tuple) or not spec:
        return spec
    memory, *words = spec
    return type(spec)([memory, *(_word(word, types) for word in words)])


def _word(word: Any, types: dict[int, MPI.Datatype]) -> Any:
    """Of a specification, a type, a count, or the counts and displacements of blocks, which may be
    arrays as well; only a tuple stays one, as one of two means something else."""
    if isinstance(word, MPI.Datatype):
        if word == MPI.DATATYPE_NULL or word.is_predefined:
            return word
        if word.handle not in types:
            types[word.handle] = word.Dup()
        return types[word.handle]
    if isinstance(word, str) or not np.iterable(word):
        return word
    return (tuple if type(word) is tuple else list)(_word(each, types) for each in word)


def _as_mpi_takes_them(arguments: Arguments) -> tuple[Any, ...]:
    collective, sendbuf, recvbuf, op, root, vector, recvcounts = arguments
    if collective == "barrier":
        return ()
    if collective == "broadcast":
        return recvbuf, root
    if collective == "scatter":
        return sendbuf, MPI.IN_PLACE if recvbuf is None else recvbuf, root
    given = (MPI.IN_PLACE if sendbuf is None else sendbuf, recvbuf)
    if collective == "reduce_scatter" and (vector or recvcounts is not None):
        return (*given, recvcounts, op)
    if collective == "gather":
        return (*given, root)
    if collective == "reduce":
        return (*given, op, root)
    return given if op is None else (*given, op)
