"""One parsed collective call, and the function that its operation reduces by."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.algorithms import own
from collectives.calls.arguments import Arguments
from collectives.calls.buffers import OPAQUE, CallBuffer
from collectives.calls.mpi4py_spec import LETTERS
from collectives.contracts import Contract, Member, contract
from collectives.errors import InvalidBuffer
from collectives.execution.memory import INTEGER, OPERATIONS, Combine, Items, is_on_device
from collectives.execution.messages import Counts
from collectives.schedule import Schedule


@dataclass(frozen=True)
class Call:
    """A parsed call; ``str(call)`` must be the same on all ranks.

    Attributes:
        arguments: the caller's, in words that mpi4py takes.
        member: this rank.
        send: ``None`` in place, or where this rank sends nothing.
        recv: ``None`` where this rank receives nothing, or at the root of a scatter in place.
        counts: lengths of the blocks of a v-variant.
        aside: in place, but the input lies where the result goes.
        algorithm: the algorithm's name with its options, or ``auto``.
        why: the reason for this algorithm.
        proved: the schedule of a program's own algorithm, without segments, as it was proved.
    """

    arguments: Arguments
    member: Member
    send: CallBuffer | None
    recv: CallBuffer | None
    counts: Counts | None
    aside: bool
    algorithm: str
    proved: Schedule | None = None
    why: str = "asked for"

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
    def buffer(self) -> CallBuffer:
        """One of the two buffers: both have the same type."""
        buffer = self.recv or self.send
        assert buffer is not None, "every rank of a collective has a buffer"
        return buffer

    def has_buffers_of(self, given: Arguments) -> bool:
        """Whether the MPI library's own collective takes the buffers in the caller's words."""
        mine = self.arguments
        return mine.sendbuf is given.sendbuf and mine.recvbuf is given.recvbuf

    @cached_property
    def combine(self) -> Combine | None:
        """The function that reduces two arrays; ``None`` for a collective that only moves data.

        Raises:
            InvalidBuffer: MPI does not define the operation on this type.
        """
        if self.op is None:
            return None
        return combiner(self.op, self.buffer.items.dtype, self.buffer.datatype)

    @property
    def count(self) -> int:
        """Items of a block, where all are equal."""
        blocks = self.contract
        if self.recv is not None:
            return self.recv.items.size // max(1, blocks.recv_blocks(self.member))
        return self.buffer.items.size // max(1, blocks.send_blocks(self.member))

    @property
    def nbytes(self) -> int:
        """Bytes of the largest buffer of any rank; for unequal blocks, of this rank's."""
        return self.count * self.contract.blocks(self.member.size) * self.buffer.items.itemsize

    @property
    def least_bytes(self) -> int:
        """Bytes that each rank sends at least, by any algorithm."""
        return self.contract.least_bytes(self.member.size, self.nbytes)

    @property
    def known_nbytes(self) -> int:
        """Bytes of the largest buffer of any rank; 0 if not every rank can compute them, as for
        most collectives of unequal blocks."""
        if self.counts is None:
            return self.nbytes
        if self.collective in ("reduce_scatter", "allgather"):
            return max(map(sum, self.counts)) * self.buffer.items.itemsize
        return 0

    @property
    def is_on_device(self) -> bool:
        """Whether the buffers lie on a GPU."""
        return is_on_device(self.buffer.items)

    @cached_property
    def key(self) -> tuple[object, ...] | None:
        """A key of the plan: calls with equal keys can use the same plan.

        It names memory by address, length and type.  ``None`` for a call whose plan cannot be used
        again: its types may be freed, and other types get their handles; and the plan would keep
        the caller's memory.
        """
        datatype = self.buffer.datatype
        types = (b.datatype for b in (self.send, self.recv) if b is not None)
        if not all(one is None or one.is_predefined for one in types):
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

    @property
    def widens(self) -> bool:
        """Whether several floating-point numbers of 16 or 8 bits are added or multiplied, in 32
        bits; two are rounded once anyway."""
        dtype = self.buffer.items.dtype
        rounds = self.op in (MPI.SUM, MPI.PROD) and self.member.size > 2
        return rounds and dtype.itemsize <= 2 and dtype.name.startswith(("float", "bfloat"))

    @property
    def wraps(self) -> bool:
        """Whether integers of 16 or 8 bits are added or multiplied.  NumPy's wrap round; some MPI
        libraries' end at the largest one, or not, from item to item."""
        dtype = self.buffer.items.dtype
        return self.op in (MPI.SUM, MPI.PROD) and dtype.kind in "iu" and dtype.itemsize <= 2

    @property
    def overlap(self) -> int:
        """Bytes of a part of the send buffer that lie in the receive buffer, too."""
        if self.send is None or self.recv is None or self.aside:
            return 0
        spans = product(self.send.spans(), self.recv.spans())
        return next((n for a, b in spans if (n := min(a[1], b[1]) - max(a[0], b[0])) > 0), 0)

    def refuse_overlap(self) -> None:
        """Raises :class:`InvalidBuffer` if the two buffers share memory: results would depend on
        who comes first."""
        if nbytes := self.overlap:
            raise InvalidBuffer(
                f"{self.collective}: the send and receive buffers share {nbytes} bytes; pass "
                "MPI.IN_PLACE, or buffers of their own"
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
        digests = ", ".join(own(self.collective, self.algorithm))
        whose = f" (own, {digests})" if digests else ""
        return (
            f"{self.collective}{op}{root} of {size} "
            f"{'on a GPU ' if self.is_on_device else ''}by {self.algorithm}{whose}"
        )


def _identity(op: MPI.Op | None) -> object:
    """An operation's handle; for a user's, the object: another may get its handle."""
    if op is None:
        return None
    return op.handle if op.is_predefined else (id(op),)


def named(name: str) -> MPI.Op:
    """MPI's operation of this name, in small letters."""
    op: MPI.Op = getattr(MPI, name.upper())
    return op


def _name(op: MPI.Op) -> str:
    """Handles of operations that users made differ between ranks, so those have one name."""
    commutes = "commutes" if op.is_commutative else "does not commute"
    known = (name.upper() for name in (*OPERATIONS, "maxloc", "minloc") if op == named(name))
    return next(known, f"of the user's that {commutes}")


def combiner(op: MPI.Op, dtype: np.dtype[Any], datatype: MPI.Datatype | None) -> Combine:
    """The function ``combine(left, right, out=...)`` of ``op`` on arrays of ``dtype``.

    Built-in operations on numbers are NumPy's ufuncs.  Unlike MPI's comparison, ``MAX`` and ``MIN``
    propagate NaN, which is what makes their result independent of the order.  Operations of the
    user's and the pair types of ``MAXLOC`` go through ``MPI_Reduce_local`` on ``datatype``.

    Raises:
        InvalidBuffer: if MPI does not define ``op`` on this type.
    """
    if dtype == OPAQUE:
        raise InvalidBuffer(
            "only MPI reduces items of derived types; leave the algorithm out, or name the type of "
            "the numbers"
        )
    # Bits are bits, whatever they mean.
    is_number = datatype is None or datatype not in LETTERS
    for name, (ufunc, kinds) in OPERATIONS.items():
        if op == named(name):
            if dtype.kind not in kinds or dtype.type is np.void:
                raise InvalidBuffer(f"MPI defines no {ufunc.__name__} on {dtype}")
            if not (is_number or kinds is INTEGER):
                assert datatype is not None, "or it would be one"
                raise InvalidBuffer(
                    f"MPI defines no {ufunc.__name__} on {datatype.name}, as it does not say what "
                    "the bytes mean; name the type of the numbers"
                )
            return ufunc
    if op in (MPI.OP_NULL, MPI.REPLACE, MPI.NO_OP):
        raise InvalidBuffer("this operation is not one that reduces; pass MPI.SUM or another")
    if datatype is None:
        raise InvalidBuffer(f"this operation needs an MPI datatype, and MPI has none for {dtype}")
    return _ReduceLocal(op, datatype)


class _ReduceLocal:
    """An operation that only MPI knows.

    ``MPI_Reduce_local(in, inout)`` overwrites its right operand, so it works on a copy.
    """

    def __init__(self, op: MPI.Op, datatype: MPI.Datatype) -> None:
        self.op = op
        self.datatype = datatype
        if op.is_predefined:  # a run would raise in the middle: MAXLOC has pairs, and no numbers
            item = np.zeros(datatype.extent, np.uint8)
            try:
                op.Reduce_local([item, 1, datatype], [item.copy(), 1, datatype])
            except MPI.Exception:
                name = datatype.name or "this type"
                raise InvalidBuffer(f"MPI defines no {_name(op)} on {name}") from None

    def __call__(self, left: Items, right: Items, /, *, out: Items) -> None:
        result = right.copy()
        self.op.Reduce_local(
            [left.view(np.uint8), left.size, self.datatype],
            [result.view(np.uint8), result.size, self.datatype],
        )
        out[...] = result
