"""A drop-in for mpi4py's communicator whose collectives are ours."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, Self

import numpy.typing as npt
from mpi4py import MPI

from collectives.call import Arguments
from collectives.engine import AnyPlan, Engine, Small
from collectives.methods import Blocking, Nonblocking, Persistent
from collectives.transport.checked import CheckedTransport
from collectives.transport.mpi import MPITransport
from collectives.watchdog import report_calls


class Communicator(Blocking, Nonblocking, Persistent, MPI.Intracomm):  # type: ignore[misc]
    """``MPI.Intracomm`` with ``algorithm=`` on its collectives; the rest is mpi4py's.

    >>> comm = Communicator(MPI.COMM_WORLD)
    >>> comm.Allreduce(sendbuf, recvbuf, op=MPI.SUM, algorithm="ring")   # doctest: +SKIP

    Buffers are given as to mpi4py: ``array``, ``[array, MPI.FLOAT]``, ``[array, count,
    MPI.FLOAT]``, ``MPI.IN_PLACE``; for v-variants ``[array, counts, displacements, MPI.FLOAT]``.
    ``algorithm`` is a name of ``python -m collectives list``, with options
    (``"parameter_server:servers=2"``), ``"native"`` for the MPI library's own, or ``"auto"``.  An
    all-reduce is bitwise equal on all ranks, whatever the algorithm.

    Args:
        comm: the communicator to work on.  It is duplicated at the first collective, so that our
            messages and the caller's cannot meet.
        algorithm: what calls use that name none, where their collective has it.
        check: compare every call across ranks first, so that calls that do not belong together
            raise :class:`MismatchError` on all ranks instead of hanging; one small exchange a
            call.  Default: whether ``COLLECTIVES_CHECK`` is set to other than ``0``.
        tuning: the table that ``auto`` goes by, as rank 0 finds it; a file of ``python -m
            collectives tune``.  Default: that of ``COLLECTIVES_TUNING``, or the one built in.
        timeout: after so many seconds in one collective, one of the ranks that wait says who is
            missing and where they are, and the job ends (:mod:`collectives.watchdog`); making the
            communicator is then collective.  Default: that of ``COLLECTIVES_TIMEOUT``, or never.
        transport: of messages: :class:`MPITransport`, or :class:`CheckedTransport`, whose messages
            each carry a checksum; ``auto`` then is never native, and ``empty`` gives ordinary
            memory.  Default: the latter if ``COLLECTIVES_CHECKSUMS`` is set to other than ``0``.
        device: how messages of CuPy arrays go: ``"direct"``, handed to a CUDA-aware MPI;
            ``"staged"`` through pinned host memory; ``"auto"``: direct if a transfer in a child
            process works.  Default: that of ``COLLECTIVES_DEVICE``, or auto.

    Raises:
        ValueError: for a timeout or a device that is none.
    """

    _engine: Engine

    def __new__(
        cls,
        comm: MPI.Intracomm | None = None,
        algorithm: str = "auto",
        check: bool | None = None,
        tuning: str | Path | None = None,
        timeout: float | None = None,
        device: str | None = None,
        transport: type[MPITransport] | None = None,
    ) -> Self:
        self = super().__new__(cls, comm)
        if check is None:
            check = os.environ.get("COLLECTIVES_CHECK", "0") != "0"
        if timeout is None and self != MPI.COMM_NULL:  # as it is while mpi4py duplicates
            timeout = _seconds(os.environ.get("COLLECTIVES_TIMEOUT", ""))
        device = device or os.environ.get("COLLECTIVES_DEVICE", "auto")
        if device not in ("auto", "direct", "staged"):
            raise ValueError(f"device={device!r} is none of auto, direct and staged")
        if transport is None:
            sealed = os.environ.get("COLLECTIVES_CHECKSUMS", "0") != "0"
            transport = CheckedTransport if sealed else MPITransport
        self._engine = Engine(self, algorithm, check, tuning, timeout, device, transport)
        return self

    @property
    def last_plan(self) -> AnyPlan | Small | None:
        """The plan of the last call: its ``algorithm`` and the ``reason`` for it."""
        return self._engine.last_plan

    def report_calls(self) -> str:
        """The last calls of this rank, for people, on all communicators with a ``timeout``."""
        return report_calls()

    def waiting(self, what: str, *, by_all: bool = True) -> AbstractContextManager[None]:
        """What happens in a ``with`` statement waits for other ranks: the watchdog watches it, too.

        Args:
            what: it is, for the report.
            by_all: all ranks do it, in the same order of their collectives.
        """
        watchdog = self._engine.watchdog
        return watchdog.waiting(what, numbered=by_all) if watchdog else nullcontext()

    def allgather(self, sendobj: Any) -> list[Any]:
        with self.waiting("allgather of objects"):
            return super().allgather(sendobj)

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        with self.waiting("allreduce of objects"):
            return super().allreduce(sendobj, op)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        with self.waiting("bcast of an object"):
            return super().bcast(obj, root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        with self.waiting("gather of objects"):
            return super().gather(sendobj, root)

    @property
    def checks_messages(self) -> bool:
        """Whether its messages carry checksums."""
        return self._engine.resources.kind.sealed

    @property
    def ranks_per_node(self) -> int:
        """On the fullest node.  Collective at its first use."""
        return self._engine.resources.ranks_per_node

    @property
    def nodes(self) -> int:
        """At least so many.  Collective at its first use."""
        return -(-self.size // self.ranks_per_node)

    def plan(self, arguments: Arguments, algorithm: str | None = None) -> AnyPlan:
        """A plan for the collective that ``arguments`` name, as ``Allreduce_init`` and the others
        give it."""
        return self._engine.make(arguments, algorithm)

    def empty(
        self, shape: Any, dtype: Any = float, memory: Literal["numpy", "cupy"] = "numpy"
    ) -> npt.NDArray[Any]:
        """A new array of zeros on every rank, in memory that the ranks of a node can all address.

        Collectives on such arrays are loads and stores: no message is sent.  Collective; the shape
        may differ between ranks.  The memory goes with the last array in it.  It is ordinary
        memory where the ranks are on several nodes, cannot open one another's memory (containers of
        their own), or run on a processor other than x86-64; the log says so.

        Args:
            memory: ``"cupy"`` for arrays on the current GPU, by CUDA IPC; the kernels of a
                collective read and write the other GPUs' memory.  It goes when the communicator is
                closed and the last array in it is gone.

        Raises:
            ValueError: for another ``memory``.
        """
        if memory not in ("numpy", "cupy"):
            raise ValueError(f'memory={memory!r} is neither "numpy" nor "cupy"')
        return self._engine.empty(shape, dtype, memory)

    def Dup(self, info: MPI.Info | None = None) -> Self:
        return self._like(super().Dup(info))

    def Split(self, color: int = 0, key: int = 0) -> Self:
        return self._like(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Self:
        return self._like(super().Split_type(split_type, key, info))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Self:
        return self._like(super().Create_group(group, tag))

    def Revoke(self) -> None:
        """After a rank has died (ULFM): nobody waits in this communicator any more."""
        self._engine.revoke()
        super().Revoke()

    def Shrink(self) -> Self:
        return self._like(super().Shrink())

    def Free(self) -> None:
        """Frees this handle's communicator, with everything that :meth:`close` releases."""
        self.close()
        super().Free()

    def close(self) -> None:
        """Releases plans and the duplicate; the communicator itself stays usable.  Collective."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:  # with one rank in trouble, a collective Free would hang
            self.close()

    def _like(self, comm: MPI.Comm) -> Self:
        """``comm`` with this communicator's settings."""
        if comm == MPI.COMM_NULL:
            return comm  # type: ignore[return-value]  # as mpi4py: the rank is in no group
        engine = self._engine
        return type(self)(
            comm,  # type: ignore[arg-type]
            engine.algorithm,
            engine.check,
            engine.resources.tuning,
            engine.timeout,
            engine.resources.device,
            engine.resources.kind,
        )


def _seconds(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise ValueError(f"COLLECTIVES_TIMEOUT={text!r} is no number of seconds") from None
