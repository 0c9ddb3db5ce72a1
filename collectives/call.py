"""One collective call: its arguments, understood or refused."""

from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from collectives.algorithms import find, parse
from collectives.buffers import HostBuffer, host_buffer
from collectives.contracts import contract
from collectives.errors import InvalidBuffer, UnknownAlgorithm
from collectives.tuner import Choice, choose


@dataclass(frozen=True)
class Call:
    """What a rank asks for; ``str(call)`` must be the same on all ranks.

    Attributes:
        arguments: send buffer, receive buffer and operation as the caller gave them.
        send: ``None`` in place.
        algorithm: what was asked for.
        root: of a broadcast.
    """

    collective: str
    arguments: tuple[Any, Any, MPI.Op | None]
    send: HostBuffer | None
    recv: HostBuffer
    op: MPI.Op | None
    algorithm: str
    root: int = 0

    def choose(self, size: int, shared: bool) -> Choice:
        """The algorithm and why; ``shared`` if the buffers lie in the node's memory."""
        if self.algorithm != "auto":
            return Choice(self.algorithm, "asked for")
        return choose(
            self.collective,
            self.recv.items.nbytes,
            size,
            self.op is None or self.op.is_commutative,
            self.recv.mpi_datatype() is not None,
            shared,
        )

    @property
    def key(self) -> tuple[object, ...]:
        """Equal keys mean equal plans: memory is named by address, length and type."""
        datatype = self.recv.datatype
        return (
            self.collective,
            self.algorithm,
            self.root,
            None if self.op is None else self.op.handle,
            None if self.send is None else self.send.address,
            self.recv.address,
            self.recv.items.size,
            self.recv.items.dtype,
            None if datatype is None else datatype.handle,
        )

    def __str__(self) -> str:
        op = "" if self.op is None else f" {_name(self.op)}"
        root = f" from {self.root}" if self.collective == "broadcast" else ""
        return (
            f"{self.collective}{op}{root} of {self.recv.items.size} x {self.recv.items.dtype} "
            f"by {self.algorithm}"
        )


def read_call(
    collective: str,
    size: int,
    sendbuf: Any,
    recvbuf: Any,
    op: MPI.Op | None,
    algorithm: str,
    root: int = 0,
) -> Call:
    """Reads the buffers, as mpi4py takes them.

    Raises:
        InvalidBuffer: for buffers that cannot be used.
        UnknownAlgorithm: for no such algorithm, or one that the operation cannot use.
    """
    if not 0 <= root < size:
        raise InvalidBuffer(f"{collective}: root {root} is not one of the {size} ranks")
    blocks = contract(collective)
    recv = host_buffer(recvbuf, "receive", blocks.recv_blocks(size))
    send = None
    if sendbuf is not None and sendbuf is not MPI.IN_PLACE:
        send = host_buffer(sendbuf, "send", blocks.send_blocks(size))
        if send.items.dtype != recv.items.dtype:
            raise InvalidBuffer(
                f"{collective}: the send buffer is {send.items.dtype}, the receive buffer "
                f"{recv.items.dtype}; both must have the same type"
            )
    name, _ = parse(algorithm)
    if name not in ("auto", "native"):
        ordered = find(collective, name).keeps_order
        if op is not None and not op.is_commutative and not ordered:
            raise UnknownAlgorithm(
                f"{name} does not keep rank order, which this operation needs because it does not "
                "commute; use 'butterfly' or 'native'"
            )
    return Call(collective, (sendbuf, recvbuf, op), send, recv, op, algorithm, root)


def _name(op: MPI.Op) -> str:
    """Handles of operations that users made differ between ranks, so those have one name."""
    predefined = ("SUM", "PROD", "MAX", "MIN", "MAXLOC", "MINLOC")
    logical = ("LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
    known = (name for name in (*predefined, *logical) if op == getattr(MPI, name))
    return next(known, "of the user's")
