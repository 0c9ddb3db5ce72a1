"""A drop-in for mpi4py's communicator whose collectives are ours."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy.typing as npt
from mpi4py import MPI

from collectives import extras
from collectives.algorithms import Algorithm, check_default, resolve
from collectives.calls.arguments import Arguments
from collectives.calls.engine import AnyPlan, Engine, Native
from collectives.calls.methods.blocking import Blocking
from collectives.calls.methods.constructors import Constructors
from collectives.calls.methods.derived import Nonblocking, Persistent
from collectives.calls.methods.objects import Objects
from collectives.calls.methods.point_to_point import PointToPoint, Requests
from collectives.calls.settings import Settings
from collectives.execution.progress import Moving
from collectives.execution.traffic import Traffic
from collectives.execution.transport import Bytes
from collectives.execution.transport.mpi import Envelope, MPITransport
from collectives.failure.abort import abort_when_uncaught
from collectives.launchers import check_launch


class Communicator(  # type: ignore[misc]
    Blocking, Nonblocking, Persistent, Objects, PointToPoint, Requests, Constructors, MPI.Intracomm
):
    """``MPI.Intracomm`` with ``algorithm=`` on its collectives; the rest is mpi4py's.

    >>> comm = Communicator(MPI.COMM_WORLD)
    >>> comm.Allreduce(sendbuf, recvbuf, op=MPI.SUM, algorithm="ring")   # doctest: +SKIP

    Buffers are given as to mpi4py: ``array``, ``[array, MPI.FLOAT]``, ``[array, count,
    MPI.FLOAT]``, ``MPI.IN_PLACE``; for v-variants ``[array, counts, displacements, MPI.FLOAT]``.
    ``algorithm`` is a name of ``python -m collectives list``, with options
    (``"parameter_server:servers=2"``), ``"native"`` for the MPI library's own, ``"nccl"`` for
    NCCL's on arrays on a GPU, or ``"auto"``; or an
    :class:`~collectives.Algorithm` of one's own, ``"file.py:name"`` or the name of one that was
    registered (:func:`collectives.register`), the same on all ranks.  An all-reduce is bitwise
    equal on all ranks, whatever the algorithm.

    An exception that nobody catches on a rank, in any thread, ends the whole job after its
    traceback; otherwise the other ranks would wait for ever.  ``COLLECTIVES_ABORT=0`` leaves the
    job alone.  ``sys.exit`` is no exception of that kind: guard a program that exits on
    one rank with :func:`collectives.failure.abort.abort_on_exception`.

    On device memory, blocking calls and ``Wait`` return when all work is queued.  It comes after
    the work that the current stream had queued before, and before what the stream does next.

    Args:
        comm: the communicator to work on.  It is duplicated at the first collective, so that our
            messages and the caller's cannot meet.  One with a topology keeps it: on an
            ``MPI.Cartcomm``, this makes an ``MPI.Cartcomm`` as well.
        algorithm: the algorithm of calls that name none, where their collective has it.
        check: compare every call across ranks first, so that calls that do not belong together
            raise :class:`MismatchError` on all ranks instead of hanging; one small exchange a
            call.  Default: whether ``COLLECTIVES_CHECK`` is on.
        tuning: the table that ``auto`` goes by, as rank 0 finds it; a file of ``python -m
            collectives tune``.  Default: the value of ``COLLECTIVES_TUNING``, or the one built in.
        timeout: after this many seconds in one collective, one of the ranks that wait says who is
            missing and where they are, and the job ends (:mod:`collectives.failure`); making the
            communicator is then collective; 0 is never.  Default: the value of
            ``COLLECTIVES_TIMEOUT``, or never.
        transport: how messages are sent: :class:`MPITransport`; :class:`CheckedTransport`, whose
            messages each carry a checksum; or :func:`~collectives.delayed`, over a link of so much
            latency and bandwidth.  With these two, ``auto`` is never native, and ``empty`` gives
            ordinary memory; with a link, ``native`` is an algorithm of ours, too, as the MPI
            library's messages cannot be delayed: those of the methods for objects are not.
            Default: by ``COLLECTIVES_CHECKSUMS`` and ``COLLECTIVES_LINK``.
        reproducible: whether sums of floating-point and complex arrays are exact and rounded once
            (:mod:`collectives.calls.reproducible`): the same bits on any number of ranks, in any
            order.  They travel as messages, as many bytes as in a ring, and adding three and more
            takes some ten passes over them.  Other operations whose result depends on the order
            are refused.  The methods for objects, as ``allreduce``, stay mpi4py's.
        device: how messages of arrays on a GPU go: ``"direct"``, handed to a CUDA-aware MPI;
            ``"staged"`` through pinned host memory; ``"auto"``: direct if a transfer between two
            processes of its own works.  Default: the value of ``COLLECTIVES_DEVICE``, or auto.

    Raises:
        LaunchError: a launcher has started more processes than MPI sees
            (:func:`collectives.check_launch`).
        UnknownAlgorithm: no collective has this algorithm.
        ScheduleError: an algorithm of one's own is wrong.
        TypeError: an argument is of another type.
        ValueError: the timeout, the device or an environment variable has a value that is not
            allowed.
    """

    _engine: Engine

    def __new__(
        cls,
        comm: MPI.Intracomm | None = None,
        algorithm: Algorithm | str = "auto",
        check: bool | None = None,
        tuning: str | Path | None = None,
        timeout: float | None = None,
        device: str | None = None,
        transport: type[MPITransport] | None = None,
        reproducible: bool = False,
    ) -> Self:
        from collectives.topologies import class_for, mpi_class  # its classes are subclasses

        chosen: Any = cls if comm is None else class_for(cls, comm)
        self: Self = mpi_class(chosen).__new__(chosen, comm)
        if comm is None:  # mpi4py makes one to fill in itself
            self._engine = Engine(self, Settings())
            return self
        check_launch()
        abort_when_uncaught()
        algorithm = resolve(algorithm)
        check_default(algorithm, comm.size if comm != MPI.COMM_NULL else None)
        given = (check, tuning, timeout, device, transport, reproducible)
        self._engine = Engine(self, Settings.given(algorithm, *given))
        return self

    def prepare(self) -> None:
        """Makes now what collectives make at their first use: duplicate, tuning table, number of
        ranks per node.  Collective.

        A first call meets all ranks for that, nonblocking ones included.  Ranks that come to the
        first calls of two communicators in another order, as MPI lets nonblocking calls and
        threads do, would wait for one another: prepare both before.  Then several threads can make
        calls, each on communicators of its own, and a nonblocking call in ordinary memory waits
        for nobody.  In memory of :meth:`empty`, calls of ours still meet, and so do first calls on
        a GPU.

        Cost: about a millisecond, once.

        Raises:
            CollectiveError: on all ranks, if the tuning table cannot be used.
            MismatchError: on all ranks, with ``check``, if one of them makes another call.
        """
        self._engine.prepare()

    def count_traffic(self) -> Traffic:
        """Counts, from now on, what this rank sends in collectives; returns the counts.

        They are for this communicator and for communicators that are made of it from now on.  They
        leave out plans that were made before, the point-to-point methods and those for objects.
        Calling it again begins again from 0.

        Cost: a Python call a round, 0.1 us.
        """
        traffic = Traffic()
        self._engine.set_traffic(traffic)
        return traffic

    @property
    def traffic(self) -> Traffic | None:
        """The counts, if counting is on."""
        return self._engine.progress.traffic

    @property
    def last_plan(self) -> AnyPlan | Native | None:
        """The plan of the last call: its ``algorithm`` and the ``reason`` for it."""
        return self._engine.last_plan

    def report_calls(self) -> str:
        """The last calls of this rank, for people, on all communicators with a ``timeout``."""
        return extras.report_calls()

    def attend(self, moving: Moving) -> Callable[[], None]:
        """Calls ``moving.Test()`` from now on whenever this thread waits for a collective, as
        another rank may wait for ``moving`` before it comes there.  ``Test`` returns whether it is
        complete: a collective of the MPI library, which cannot call it, waits until it is.

        Args:
            moving: has ``Test()``, ``abandon()``, which gives up, and an attribute ``among``, which
                is set here.

        Returns:
            Ends that.
        """
        progress = self._engine.progress
        progress.add(moving)
        return lambda: progress.remove(moving)

    def watch(self) -> None:
        """Watches the methods for objects and :meth:`waiting` without a limit of time: what can
        never end ends the job in seconds (:mod:`collectives.failure`).  Collective.

        Does nothing where there is a ``timeout``, or where it is 0.  Cost: a few microseconds for
        each of these, and an idle thread.
        """
        self._engine.watch()

    def waiting(self, what: str, *, by_all: bool = True) -> AbstractContextManager[None]:
        """Marks a block that waits for other ranks, so that the watchdog sees it.

        Args:
            what: how the report names it, by its first 500 letters.
            by_all: whether all ranks do it, in the same order among their collectives.
        """
        return self._engine.waiting(what, by_all)

    @property
    def is_reproducible(self) -> bool:
        """Whether sums of floating-point numbers are exact and rounded once."""
        return self._engine.settings.reproducible

    @property
    def checks_messages(self) -> bool:
        """Whether its messages carry checksums."""
        return self._engine.settings.has_checksums

    @property
    def delays_messages(self) -> bool:
        """Whether its messages arrive as over a slower link."""
        return self._engine.settings.transport.delays

    def envelope(self, data: Bytes) -> Envelope | None:
        """The envelope of a point-to-point message of these bytes; ``None`` if messages carry
        nothing but bytes."""
        return self._engine.settings.transport.envelope(data)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on the fullest node.  Collective at its first use."""
        return self._engine.resources.ranks_per_node

    @property
    def nodes(self) -> int:
        """Lower bound on the number of nodes.  Collective at its first use."""
        return -(-self.size // self.ranks_per_node)

    def plan(self, arguments: Arguments, algorithm: Algorithm | str | None = None) -> AnyPlan:
        """A plan of the collective in ``arguments``, like that of ``Allreduce_init``; all ranks
        must run such plans in one order, as blocking calls."""
        return self._engine.make(arguments, algorithm, in_order=True)

    def empty(
        self, shape: Any, dtype: Any = float, memory: Literal["numpy", "cupy"] = "numpy"
    ) -> npt.NDArray[Any]:
        """A new array of zeros on every rank, in memory that the ranks of a node can all address.

        Collectives on such arrays are loads and stores: no message is sent.  Collective; the shape
        may differ between ranks.  The memory goes with the last array in it.  It is ordinary
        memory where the ranks are on several nodes or cannot open one another's memory (containers
        of their own); the log says so.

        Cost: some small exchanges among the ranks and one write of the array; the node's memory is
        taken in whole pages.  Calls that ``auto`` leaves to the MPI library unread because no
        memory is shared are read from then on, some microseconds each.

        Args:
            shape: a length or several, of 0 and more, as of ``numpy.zeros``.
            dtype: a type that processes can share, so no Python objects; also a type of torch, or
                the name of one of ml_dtypes, as ``"bfloat16"``.
            memory: ``"cupy"`` for arrays on the current GPU, by CUDA IPC; the kernels of a
                collective read and write the other GPUs' memory.  It goes when the communicator is
                closed and the last array in it is gone.

        Raises:
            InvalidBuffer: on all ranks, if one passes what is no shape or type of an array, or
                ``"cupy"`` where it has no GPU, or if ``memory`` differs between ranks.
            MemoryError: on all ranks, if one has too little memory, or their node has less than
                all of them ask for.
            MismatchError: on all ranks, with ``check``, if one of them makes another call.
            CollectiveError: a collective was left in the middle on this rank before.
        """
        with self._engine.changing_memory("empty"):
            return self._engine.resources.empty(shape, dtype, memory)

    def Revoke(self) -> None:
        """After a rank has died (ULFM): nobody waits in this communicator any more."""
        self._engine.revoke()
        super().Revoke()

    def Free(self) -> None:
        """Frees this handle's communicator, with everything that :meth:`close` releases."""
        self.close()
        super().Free()

    def free(self) -> None:
        """As mpi4py's, which frees what was made and leaves ``MPI.COMM_WORLD`` be."""
        if self not in (MPI.COMM_NULL, MPI.COMM_WORLD, MPI.COMM_SELF):
            self.close()
        super().free()

    @classmethod
    def fromhandle(cls, handle: int) -> Self:
        return cls(cast(MPI.Intracomm, MPI.Comm.fromhandle(handle)))

    @classmethod
    def fromint(cls, arg: int) -> Self:
        return cls(cast(MPI.Intracomm, MPI.Comm.fromint(arg)))

    @classmethod
    def f2py(cls, arg: int) -> Self:
        return cls(cast(MPI.Intracomm, MPI.Comm.f2py(arg)))

    def __reduce__(self) -> Any:
        """Copies keep the topology and the settings; those that every process has can be pickled.

        Raises:
            ValueError: another one is pickled.
        """
        from collectives.topologies import mpi_class

        return type(self), (mpi_class(type(self))(self), *self._engine.settings)

    def Disconnect(self) -> None:
        """As :meth:`Free`, after all that was sent has arrived."""
        self.close()
        super().Disconnect()

    def close(self) -> None:
        """Releases plans and the duplicate, once all plans under way have ended.  Collective.

        The communicator itself stays usable.
        """
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:  # with one rank in trouble, a collective Free would hang
            self.close()
