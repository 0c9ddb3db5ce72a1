"""A drop-in for mpi4py's communicator whose collectives are ours."""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Self

from mpi4py import MPI

from collectives.algorithms import build, find, parse
from collectives.buffers import HostBuffer, host_buffer
from collectives.contracts import contract
from collectives.errors import InvalidBuffer, MismatchError, UnknownAlgorithm
from collectives.executor import TAGS_PER_PLAN, Plan, bind
from collectives.native import NativePlan
from collectives.reduction import combiner
from collectives.transport.mpi import MPITransport
from collectives.tuner import Choice, choose

log = logging.getLogger("collectives")

#: Plans of blocking calls are kept for the next call with the same memory: as many, up to this
#: size each.  Above it, binding is cheap beside the transfer.
CACHED_PLANS = 32
CACHED_BYTES = 4 << 20

AnyPlan = Plan | NativePlan


class Communicator(MPI.Intracomm):
    """``MPI.Intracomm`` with ``algorithm=`` on its collectives; the rest is mpi4py's.

    >>> comm = Communicator(MPI.COMM_WORLD)
    >>> comm.Allreduce(sendbuf, recvbuf, op=MPI.SUM, algorithm="ring")   # doctest: +SKIP

    Buffers are given as to mpi4py: ``array``, ``[array, MPI.FLOAT]``, ``[array, count,
    MPI.FLOAT]``, ``MPI.IN_PLACE``.  ``algorithm`` is a name of ``python -m collectives list``, with
    options (``"parameter_server:servers=2"``), ``"native"`` for the MPI library's own, or
    ``"auto"``.  An all-reduce is bitwise equal on all ranks, whatever the algorithm.

    Args:
        comm: the communicator to work on.  It is duplicated at the first collective, so that our
            messages and the caller's cannot meet.
        algorithm: what calls use that name none.
        check: compare every call across ranks first, so that calls that do not belong together
            raise :class:`MismatchError` on all ranks instead of hanging; one small exchange a
            call.  Default: whether ``COLLECTIVES_CHECK`` is set to other than ``0``.
    """

    def __new__(
        cls, comm: MPI.Intracomm | None = None, algorithm: str = "auto", check: bool | None = None
    ) -> Self:
        return super().__new__(cls, comm)

    def __init__(
        self, comm: MPI.Intracomm | None = None, algorithm: str = "auto", check: bool | None = None
    ) -> None:
        self._algorithm = algorithm
        self._check = os.environ.get("COLLECTIVES_CHECK", "0") != "0" if check is None else check
        self._transport: MPITransport | None = None
        self._plans_made = 0
        self._active: list[Plan] = []
        self._cache: OrderedDict[tuple[object, ...], AnyPlan] = OrderedDict()
        #: The plan of the last call: its ``algorithm`` and the ``reason`` for it.
        self.last_plan: AnyPlan | None = None

    def Allreduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> None:
        """Reduces ``sendbuf`` over all ranks into every rank's ``recvbuf``."""
        self._run("allreduce", sendbuf, recvbuf, op, algorithm)

    def Allgather(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> None:
        """Gathers every rank's ``sendbuf`` into every rank's ``recvbuf``, in rank order."""
        self._run("allgather", sendbuf, recvbuf, None, algorithm)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> None:
        """Sends block j of ``sendbuf`` to rank j, and receives its block into place j."""
        self._run("alltoall", sendbuf, recvbuf, None, algorithm)

    def Allreduce_init(  # type: ignore[override]
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Allreduce`; it keeps the buffers alive.  Collective, like MPI's."""
        return self._make("allreduce", sendbuf, recvbuf, op, algorithm)

    def Allgather_init(  # type: ignore[override]
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Allgather`."""
        return self._make("allgather", sendbuf, recvbuf, None, algorithm)

    def Alltoall_init(  # type: ignore[override]
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> AnyPlan:
        """A plan for :meth:`Alltoall`."""
        return self._make("alltoall", sendbuf, recvbuf, None, algorithm)

    def Dup(self, info: MPI.Info | None = None) -> Self:
        return self._like(super().Dup(info))

    def Split(self, color: int = 0, key: int = 0) -> Self:
        return self._like(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Self:
        return self._like(super().Split_type(split_type, key, info))

    def Free(self) -> None:
        """Frees this handle's communicator, with everything that :meth:`close` releases."""
        self.close()
        super().Free()

    def close(self) -> None:
        """Releases plans and the duplicate; the communicator itself stays usable.  Collective."""
        for plan in self._cache.values():
            plan.Free()
        self._cache.clear()
        if self._transport is not None:
            self._transport.channel.Free()
            self._transport = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:  # with one rank in trouble, a collective Free would hang
            self.close()

    def _like(self, comm: MPI.Comm) -> Self:
        """``comm`` with this communicator's settings."""
        if comm == MPI.COMM_NULL:
            return comm  # type: ignore[return-value]  # as mpi4py: the rank is in no group
        return type(self)(comm, self._algorithm, self._check)  # type: ignore[arg-type]

    @property
    def _mpi(self) -> MPITransport:
        if self._transport is None:
            self._transport = MPITransport(MPI.Intracomm(self).Dup())
        return self._transport

    def _run(
        self, collective: str, sendbuf: Any, recvbuf: Any, op: MPI.Op | None, algorithm: str | None
    ) -> None:
        """A blocking call: look its plan up by the memory that it is about, or bind one."""
        if (algorithm or self._algorithm) == "native" and not self._check:
            plan: AnyPlan = NativePlan(self, collective, sendbuf, recvbuf, op, "asked for")
            self.last_plan = plan
            plan()
            return
        call = _Call(self, collective, sendbuf, recvbuf, op, algorithm or self._algorithm)
        self._agree(call)
        if call.error:
            raise call.error
        key = call.key
        plan = self._cache.get(key)  # type: ignore[assignment]
        if plan is None:
            # Blocking calls follow one another, so they can all use the first tags.
            plan = call.plan(tag=0, borrow=True)
            if plan.nbytes <= CACHED_BYTES:
                self._cache[key] = plan
            if len(self._cache) > CACHED_PLANS:
                self._cache.popitem(last=False)[1].Free()
        else:
            self._cache.move_to_end(key)
        self.last_plan = plan
        plan()

    def _make(
        self, collective: str, sendbuf: Any, recvbuf: Any, op: MPI.Op | None, algorithm: str | None
    ) -> AnyPlan:
        call = _Call(self, collective, sendbuf, recvbuf, op, algorithm or self._algorithm)
        self._agree(call)
        if call.error:
            raise call.error
        self._plans_made += 1
        slots = (self.Get_attr(MPI.TAG_UB) or 0) // TAGS_PER_PLAN - 1
        self.last_plan = call.plan(tag=(1 + self._plans_made % slots) * TAGS_PER_PLAN, borrow=False)
        return self.last_plan

    def _agree(self, call: "_Call") -> None:
        """With checking on: raises on all ranks if the calls differ or one of them is wrong."""
        if not self._check:
            return
        calls: dict[str, list[int]] = {}
        for rank, text in enumerate(self._mpi.channel.allgather(call.fingerprint)):
            calls.setdefault(text, []).append(rank)
        if len(calls) > 1:
            told = "; ".join(
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
                for text, ranks in calls.items()
            )
            raise MismatchError(f"the ranks' calls do not belong together: {told}")


class _Call:
    """The arguments of one collective call, understood or refused."""

    def __init__(
        self,
        comm: Communicator,
        collective: str,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | None,
        algorithm: str,
    ) -> None:
        self.comm = comm
        self.collective = collective
        self.arguments = (sendbuf, recvbuf, op)
        self.op = op
        self.error: Exception | None = None
        try:
            self._read(algorithm)
        except (InvalidBuffer, UnknownAlgorithm) as error:
            self.error = error

    def _read(self, algorithm: str) -> None:
        sendbuf, recvbuf, op = self.arguments
        blocks = contract(self.collective)
        self.recv = host_buffer(recvbuf, "receive", blocks.recv_blocks(self.comm.size))
        self.send: HostBuffer | None = None
        if not (sendbuf is None or sendbuf is MPI.IN_PLACE):
            self.send = host_buffer(sendbuf, "send", blocks.send_blocks(self.comm.size))
            if self.send.items.dtype != self.recv.items.dtype:
                raise InvalidBuffer(
                    f"{self.collective}: the send buffer is {self.send.items.dtype}, the receive "
                    f"buffer {self.recv.items.dtype}; both must have the same type"
                )
        commutes = op is None or op.is_commutative
        if algorithm == "auto":
            self.choice = choose(
                self.collective,
                self.recv.items.nbytes,
                self.comm.size,
                commutes,
                self.recv.mpi_datatype() is not None,
            )
        else:
            self.choice = Choice(algorithm, "asked for")
            name = parse(algorithm)[0]
            if name != "native" and not commutes and not find(self.collective, name).keeps_order:
                raise UnknownAlgorithm(
                    f"{name} does not keep rank order, which this operation needs because it does "
                    "not commute; use 'butterfly' or 'native'"
                )

    @property
    def key(self) -> tuple[object, ...]:
        """Equal keys mean equal plans: memory is named by address, length and type."""
        send = None if self.send is None else (self.send.address, self.send.items.size)
        datatype = self.recv.datatype
        return (
            self.collective,
            self.choice.algorithm,
            None if self.op is None else self.op.handle,
            send,
            self.recv.address,
            self.recv.items.size,
            self.recv.items.dtype,
            None if datatype is None else datatype.handle,
        )

    @property
    def fingerprint(self) -> str:
        if self.error:
            return f"{self.collective}: {self.error}"
        op = "" if self.op is None else f" op {_op_name(self.op)}"
        place = " in place" if self.send is None and self.collective == "alltoall" else ""
        return (
            f"{self.collective}{place} by {self.choice.algorithm}{op} of {self.recv.items.size} x "
            f"{self.recv.items.dtype}"
        )

    def plan(self, tag: int, borrow: bool) -> AnyPlan:
        algorithm, reason = self.choice
        log.info("%s: %s (%s)", self.collective, algorithm, reason)
        if algorithm == "native":
            return NativePlan(self.comm, self.collective, *self.arguments, reason)
        schedule = build(self.collective, algorithm, self.comm.size)
        combine = None
        if self.op is not None:
            combine = combiner(self.op, self.recv.items.dtype, self.recv.mpi_datatype())
        memory: Callable[[HostBuffer], Any] = (
            HostBuffer.borrowed if borrow else lambda buffer: buffer.items
        )
        return bind(
            schedule,
            self.comm._mpi,
            None if self.send is None else memory(self.send),
            memory(self.recv),
            combine,
            tag=tag,
            reason=reason,
            active=self.comm._active,
        )


def _op_name(op: MPI.Op) -> str:
    names = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
    pairs = ("MAXLOC", "MINLOC")
    return next((n for n in (*names, *pairs) if op == getattr(MPI, n)), "of the user's")
