"""One collective call: its arguments, understood or refused."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.algorithms import find, parse
from collectives.buffers import Buffer, read_buffer, unit_of, vector_buffer
from collectives.contracts import Contract, Member, contract
from collectives.errors import InvalidBuffer, UnknownAlgorithm
from collectives.executor import Counts
from collectives.library import library
from collectives.memory import is_on_device
from collectives.tuner import Choice, Situation, Table, choose

#: Of one block; above it the MPI library's own collectives cannot count the items.
_MOST_NATIVE_ITEMS = (1 << 31) - 1


class Arguments(NamedTuple):
    """A call as the caller made it, with mpi4py's buffer specifications.

    Attributes:
        vector: the v-variant, whose blocks have lengths of their own.
        recvcounts: of ``Reduce_scatter``; ``None`` if each rank's is what its buffer holds.
    """

    collective: str
    sendbuf: Any
    recvbuf: Any
    op: MPI.Op | None = None
    root: int = 0
    vector: bool = False
    recvcounts: Sequence[int] | None = None


def barrier_arguments() -> Arguments:
    """A barrier is the reduction of a byte that nobody looks at."""
    return Arguments("barrier", np.zeros(1, np.uint8), np.zeros(1, np.uint8), MPI.BOR)


@dataclass(frozen=True)
class Call:
    """What a rank asks for; ``str(call)`` must be the same on all ranks.

    Attributes:
        arguments: as the caller gave them.
        member: this rank.
        send: ``None`` in place, or where this rank sends nothing.
        recv: ``None`` where this rank receives nothing, or at the root of a scatter in place.
        counts: lengths of the blocks of a v-variant.
        aside: in place, but the input lies where the result goes.
        algorithm: what was asked for.
    """

    arguments: Arguments
    member: Member
    send: Buffer | None
    recv: Buffer | None
    counts: Counts | None
    aside: bool
    algorithm: str

    @property
    def collective(self) -> str:
        return self.arguments.collective

    @property
    def contract(self) -> Contract:
        return contract(self.collective)

    @property
    def op(self) -> MPI.Op | None:
        return self.arguments.op

    @property
    def root(self) -> int:
        return self.arguments.root

    @cached_property
    def buffer(self) -> Buffer:
        """One of the two buffers: both have the same type."""
        buffer = self.recv or self.send
        assert buffer is not None, "every rank of a collective has a buffer"
        return buffer

    @property
    def count(self) -> int:
        """Items of a block, where all are equal."""
        blocks = self.contract
        if self.recv is not None:
            return self.recv.items.size // max(1, blocks.recv_blocks(self.member))
        return self.buffer.items.size // max(1, blocks.send_blocks(self.member))

    @property
    def nbytes(self) -> int:
        """Of the largest buffer of any rank."""
        return self.count * self.contract.blocks(self.member.size) * self.buffer.items.itemsize

    @property
    def is_on_device(self) -> bool:
        """Whether the buffers lie on a GPU."""
        return is_on_device(self.buffer.items)

    def choose(self, table: Table, per_node: int, shared: bool, sealed: bool) -> Choice:
        """What ``auto`` comes to, and why.

        Args:
            table: what was measured.
            per_node: ranks of a node.
            shared: the buffers lie in the node's memory.
            sealed: messages must carry checksums.
        """
        countable = self.count <= _MOST_NATIVE_ITEMS and not self.is_on_device
        memory = "shared" if shared else "numpy"
        if self.is_on_device:
            memory = "ipc" if shared else "cupy"
        situation = Situation(
            library(),
            self.collective,
            self._known_bytes,
            self.member.size,
            per_node,
            commutes=self.op is None or self.op.is_commutative,
            native=self.buffer.datatype is not None and countable and not sealed,
            sealed=sealed,
            uneven=self.counts is not None,
            memory=memory,
        )
        return choose(table, situation)

    @property
    def _known_bytes(self) -> int:
        """Of the largest buffer, if all ranks know it."""
        if self.counts is None:
            return self.nbytes
        if self.collective in ("reduce_scatter", "allgather"):
            return max(map(sum, self.counts)) * self.buffer.items.itemsize
        return 0  # the others' counts differ from rank to rank

    @cached_property
    def key(self) -> tuple[object, ...] | None:
        """Equal keys mean equal plans: memory is named by address, length and type.

        ``None`` for a call whose plan cannot be used again: its types may be freed, and another one
        get their handles.
        """
        datatype = self.buffer.datatype
        if datatype is not None and not datatype.is_predefined:
            return None
        return (
            self.collective,
            self.algorithm,
            self.root,
            _identity(self.op),
            *(
                (b.address, b.items.size, b.displacements) if b is not None else None
                for b in (self.send, self.recv)
            ),
            self.counts,
            self.aside,
            self.buffer.items.dtype,
            datatype.handle if datatype is not None else None,
        )

    def refuse_overlap(self) -> None:
        """Raises :class:`InvalidBuffer` if the two buffers share memory: results would depend on
        who comes first."""
        if self.send is None or self.recv is None or self.aside:
            return
        for first, last in self.send.spans():
            for start, end in self.recv.spans():
                if first < end and start < last:
                    raise InvalidBuffer(
                        f"{self.collective}: the send and receive buffers share "
                        f"{min(last, end) - max(first, start)} bytes; pass MPI.IN_PLACE, or "
                        "buffers of their own"
                    )

    @property
    def lengths(self) -> dict[Hashable, int]:
        """Bytes of each block of a v-variant that this rank knows, by the block's name: the same
        on all ranks that know it."""
        blocks, found = self.contract, {}
        if self.counts is None or blocks.block is None:
            return {}
        for buffer, counts in zip(("sendbuf", "recvbuf"), self.counts):
            for j, count in enumerate(counts):
                found[blocks.block(self.member, buffer, j)] = count * self.buffer.items.itemsize
        return found

    def __str__(self) -> str:
        op = f" {_name(self.op)}" if self.op is not None else ""
        root = f" at root {self.root}" if self.contract.rooted else ""
        block = self.count * self.buffer.items.itemsize
        size = f"{block} bytes"
        if self.counts:
            size = "blocks"
        elif self.contract.reduces:
            size = f"{self.count} x {self.buffer.items.dtype}"
        return (
            f"{self.collective}{op}{root} of {size} "
            f"{'on a GPU ' if self.is_on_device else ''}by {self.algorithm}"
        )


def _identity(op: MPI.Op | None) -> object:
    """Of a user's operation, the object, which the plan keeps: another may get its handle."""
    if op is None:
        return None
    return op.handle if op.is_predefined else (id(op),)


def read_call(arguments: Arguments, algorithm: str, rank: int, size: int) -> Call:
    """Reads the buffers, as mpi4py takes them.

    Raises:
        InvalidBuffer: for buffers that cannot be used.
        UnknownAlgorithm: for no such algorithm, or one that the call cannot use.
    """
    collective = arguments.collective
    root = _root(arguments, size)
    op = arguments.op
    if contract(collective).reduces and (not isinstance(op, MPI.Op) or op == MPI.OP_NULL):
        raise InvalidBuffer(f"{collective}: {op!r} is no operation; pass MPI.SUM or another MPI.Op")
    _check_algorithm(arguments, algorithm)
    member = Member(rank, size, root)
    arguments = arguments._replace(root=root)
    blocks = contract(collective)
    to_send, to_recv = blocks.send_blocks(member), blocks.recv_blocks(member)
    aside = collective == "reduce_scatter" and _is_in_place(arguments.sendbuf)
    send: Buffer | None
    recv: Buffer | None
    if aside:
        send, recv = _input_where_the_result_goes(arguments, member)
    else:
        send = _buffer(arguments, arguments.sendbuf, "send", to_send, member)
        recv = _buffer(arguments, arguments.recvbuf, "receive", to_recv, member)
    if send is None and recv is None:
        raise InvalidBuffer(f"{collective}: rank {rank} passes no buffer")
    if recv is None and to_recv and collective != "scatter":
        raise InvalidBuffer(f"{collective}: rank {rank} must pass a receive buffer")
    places = {is_on_device(b.items) for b in (send, recv) if b is not None}
    if len(places) > 1:
        raise InvalidBuffer(
            f"{collective}: one of the send and receive buffers lies on a GPU, the other does not"
        )
    if not blocks.reduces:
        send, recv = _as_units(arguments, send, recv, to_send, to_recv)
    elif send and recv and recv.items.size and send.items.dtype != recv.items.dtype:
        raise InvalidBuffer(
            f"{collective}: the send buffer is {send.items.dtype}, the receive buffer "
            f"{recv.items.dtype}; both must have the same type"
        )
    counts = _counts(arguments, member, send, recv)
    return Call(arguments, member, send, recv, counts, aside, algorithm)


def _root(arguments: Arguments, size: int) -> int:
    try:
        root = index(arguments.root)
    except TypeError:
        root = -1
    if not 0 <= root < size:
        raise InvalidBuffer(
            f"{arguments.collective}: root {arguments.root!r} is not one of the {size} ranks"
        )
    return root


def _as_units(
    arguments: Arguments, send: Buffer | None, recv: Buffer | None, to_send: int, to_recv: int
) -> tuple[Buffer | None, Buffer | None]:
    """Both buffers in units that all ranks come to, however they describe the same bytes."""
    pairs = ((send, to_send), (recv, to_recv))
    blocks = [b.items.nbytes // n for b, n in pairs if b is not None]
    if not arguments.vector and len(set(blocks)) > 1:
        raise InvalidBuffer(
            f"{arguments.collective}: a block of the send buffer has {blocks[0]} bytes, and one of "
            f"the receive buffer {blocks[1]}"
        )
    unit = 1 if arguments.vector else unit_of(blocks[0])
    return send and send.in_units(unit), recv and recv.in_units(unit)


def _check_algorithm(arguments: Arguments, algorithm: str) -> None:
    name, _ = parse(algorithm)
    if name in ("auto", "native"):
        return
    entry = find(arguments.collective, name)
    op = arguments.op
    if op is not None and not op.is_commutative and not entry.keeps_order:
        raise UnknownAlgorithm(
            f"{name} does not keep rank order, which this operation needs because it does not "
            "commute; use 'native' or one that 'python -m collectives list' says keeps it"
        )
    uneven = arguments.vector or arguments.recvcounts is not None
    if uneven and not entry.uneven:
        raise UnknownAlgorithm(
            f"{name} needs blocks of equal length; use 'native' or another {arguments.collective}"
        )


def _is_in_place(buffer: Any) -> bool:
    return buffer is None or buffer is MPI.IN_PLACE


#: The buffers of each v-variant that have a block for each rank.
_VECTORS = {
    "allgather": ("receive",),
    "alltoall": ("send", "receive"),
    "gather": ("receive",),
    "scatter": ("send",),
}


def _buffer(
    arguments: Arguments, spec: Any, role: str, blocks: int, member: Member
) -> Buffer | None:
    if not blocks or _is_in_place(spec):
        return None
    if arguments.vector and role in _VECTORS.get(arguments.collective, ()):
        return vector_buffer(spec, role, blocks)
    if arguments.vector and arguments.collective == "reduce_scatter":
        blocks = 1  # a count is that of all
    moves = not contract(arguments.collective).reduces
    reads = arguments.collective == "broadcast" and member.is_root
    return read_buffer(spec, role, blocks, moves=moves, readonly=reads)


def _counts(
    arguments: Arguments, member: Member, send: Buffer | None, recv: Buffer | None
) -> Counts | None:
    """Lengths of the blocks of a v-variant."""
    if arguments.recvcounts is not None:
        counts = _recvcounts(arguments, member)
        _expect("send", send, sum(counts))
        _expect("receive", recv, counts[member.rank])
        return Counts(counts, (counts[member.rank],))
    if not arguments.vector:
        return None
    sent, received = _lengths(send), _lengths(recv)
    if send is None and contract(arguments.collective).send_blocks(member):  # in place
        sent = received if arguments.collective == "alltoall" else (received[member.rank],)
    if recv is None and sent and arguments.collective == "scatter":
        received = (sent[member.rank],)
    if arguments.collective == "allgather":
        _expect("send", send, received[member.rank])
    return Counts(sent, received)


def _lengths(buffer: Buffer | None) -> tuple[int, ...]:
    if buffer is None:
        return ()
    return (buffer.items.size,) if buffer.counts is None else buffer.counts


def _expect(role: str, buffer: Buffer | None, items: int) -> None:
    if buffer is not None and buffer.items.size != items:
        size = buffer.items.itemsize
        raise InvalidBuffer(
            f"the {role} buffer has {buffer.items.size * size} bytes, but the counts say "
            f"{items * size}"
        )


def _recvcounts(arguments: Arguments, member: Member) -> tuple[int, ...]:
    try:
        counts = tuple(index(count) for count in arguments.recvcounts or ())
    except TypeError:
        counts = (-1,)
    if len(counts) != member.size or min(counts) < 0:
        raise InvalidBuffer(
            f"reduce_scatter: recvcounts are {member.size} numbers from 0 on, one for each rank, "
            f"not {arguments.recvcounts!r}"
        )
    return counts


def _input_where_the_result_goes(arguments: Arguments, member: Member) -> tuple[Buffer, Buffer]:
    """Reduce-scatter in place: the result goes to the beginning of the input."""
    if arguments.vector:
        if arguments.recvcounts is None:
            raise InvalidBuffer("reduce_scatter in place needs recvcounts, one for each rank")
        whole = read_buffer(arguments.recvbuf, "receive")
        own = _recvcounts(arguments, member)[member.rank]
        return whole, replace(whole, items=whole.items[:own])
    whole = read_buffer(arguments.recvbuf, "receive", member.size)
    return whole, replace(whole, items=whole.items[: whole.items.size // member.size])


def _name(op: MPI.Op) -> str:
    """Handles of operations that users made differ between ranks, so those have one name."""
    predefined = ("SUM", "PROD", "MAX", "MIN", "MAXLOC", "MINLOC")
    logical = ("LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
    known = (name for name in (*predefined, *logical) if op == getattr(MPI, name))
    commutes = "commutes" if op.is_commutative else "does not commute"
    return next(known, f"of the user's that {commutes}")
