"""Parses a collective call as the caller made it, or refuses it."""

from dataclasses import replace
from math import gcd
from operator import index
from typing import Any

from mpi4py import MPI

from collectives import extras
from collectives.algorithms import check, find, parse
from collectives.calls.arguments import Arguments
from collectives.calls.buffers import OPAQUE, CallBuffer, read_buffer, vector_buffer
from collectives.calls.call import Call
from collectives.calls.fast_path import nbytes_of
from collectives.calls.mpi4py_spec import LETTERS, whole_number
from collectives.calls.native import library
from collectives.contracts import Member, contract
from collectives.errors import InvalidBuffer, UnknownAlgorithm
from collectives.execution.memory import HOST, is_on_device
from collectives.execution.messages import Counts


def parse_call(arguments: Arguments, algorithm: str, rank: int, size: int) -> Call:
    """Reads the arguments, as mpi4py takes them.

    Raises:
        InvalidBuffer: the buffers cannot be used.
        UnknownAlgorithm: the collective has no such algorithm.
    """
    collective = arguments.collective
    check(collective, algorithm)
    if (name := parse(algorithm)[0]) in ("auto", "native", "nccl"):
        algorithm = name  # however it was spelled
    root = _root(arguments, size)
    op = arguments.op
    if contract(collective).reduces and (not isinstance(op, MPI.Op) or op == MPI.OP_NULL):
        raise InvalidBuffer(f"{collective}: {op!r} is no operation; pass MPI.SUM or another MPI.Op")
    member = Member(rank, size, root)
    arguments = arguments._replace(root=root)
    blocks = contract(collective)
    to_send, to_recv = blocks.send_blocks(member), blocks.recv_blocks(member)
    aside = collective == "reduce_scatter" and arguments.is_in_place
    send: CallBuffer | None
    recv: CallBuffer | None
    if aside:
        send, recv = _input_where_the_result_goes(arguments, member)
    else:
        send = _buffer(arguments, arguments.sendbuf, "send", to_send, member)
        recv = _buffer(arguments, arguments.recvbuf, "receive", to_recv, member)
    if send is None and recv is None:
        raise InvalidBuffer(f"{collective}: rank {rank} passes no buffer")
    if recv is None and to_recv and collective != "scatter":
        raise InvalidBuffer(f"{collective}: rank {rank} must pass a receive buffer")
    gpus = {b.gpu for b in (send, recv) if b is not None}
    if len(gpus) > 1:
        lies = "does not" if None in gpus else "on another one"
        raise InvalidBuffer(
            f"{collective}: one of the send and receive buffers lies on a GPU, the other {lies}; "
            "copy one of them to where the other is"
        )
    if not blocks.reduces:
        send, recv = _as_units(arguments, send, recv, to_send, to_recv)
        if algorithm in ("auto", "native"):
            send, recv = send and _with_type(send), recv and _with_type(recv)
    elif send and recv and recv.items.size and send.items.dtype != recv.items.dtype:
        sent, got = (b.items.dtype if b.items.itemsize else "a derived type" for b in (send, recv))
        raise InvalidBuffer(
            f"{collective}: the send buffer is {sent}, the receive buffer {got}; both must have "
            "the same type"
        )
    counts = _counts(arguments, member, send, recv)
    if blocks.reduces and counts is None and send and recv:
        _expect_as_many(collective, send, to_send, recv, to_recv)
    if algorithm in ("auto", "native"):
        given = (None, send) if aside else (send, recv)
        arguments = _with_sure_words(arguments, *given)
    call = Call(arguments, member, send, recv, counts, aside, algorithm)
    _expect_ours(call)
    return call


def _expect_ours(call: Call) -> None:
    """Refuses a call that no algorithm of ours can do, if the MPI library has no say in it.  The
    ranks have not met yet, so that this rank can make the call again."""
    buffer = call.buffer
    is_ours = call.algorithm not in ("auto", "native", "nccl")
    # A refusal of derived types' items is the library's.
    is_known = is_ours or (call.algorithm == "auto" and buffer.items.dtype != OPAQUE)
    if call.op is not None and (is_known or buffer.datatype is None or buffer.datatype in LETTERS):
        _ = call.combine
        if call.algorithm == "native" and buffer.datatype is None:
            raise InvalidBuffer(
                f"{call.collective}: this MPI has no type {buffer.items.dtype}, so "
                "algorithm='native' cannot reduce it; leave the algorithm out"
            )
    # MPI forbids buffers that share memory, and Open MPI takes them: auto then copies them first.
    by_auto = call.algorithm == "auto" and not call.is_on_device
    if call.algorithm != "native" and not (by_auto and library().startswith("Open MPI")):
        call.refuse_overlap()


def _expect_as_many(
    collective: str, send: CallBuffer, to_send: int, recv: CallBuffer, to_recv: int
) -> None:
    """Refuses blocks of other lengths in the two buffers, before the ranks meet."""
    expected = recv.items.size // to_recv * to_send
    if send.items.size != expected and send.gaps is recv.gaps is None:
        raise InvalidBuffer(
            f"{collective}: the send buffer has {send.items.size} items, but {expected} go with a "
            f"receive buffer of {recv.items.size}"
        )


def _root(arguments: Arguments, size: int) -> int:
    root = whole_number(arguments.root)
    if root is None or not 0 <= root < size:
        raise InvalidBuffer(
            f"{arguments.collective}: root {arguments.root!r} is not one of the {size} ranks"
        )
    return root


def _as_units(
    arguments: Arguments,
    send: CallBuffer | None,
    recv: CallBuffer | None,
    to_send: int,
    to_recv: int,
) -> tuple[CallBuffer | None, CallBuffer | None]:
    """Both buffers in units that all ranks come to, however they describe the same bytes."""
    pairs = ((send, to_send), (recv, to_recv))
    blocks = [b.items.nbytes // n for b, n in pairs if b is not None]
    if not arguments.vector and len(set(blocks)) > 1:
        raise InvalidBuffer(
            f"{arguments.collective}: a block of the send buffer has {blocks[0]} bytes, and one of "
            f"the receive buffer {blocks[1]}"
        )
    # Bytes of the largest unsigned integer that a block is a whole number of.
    unit = 1 if arguments.vector else gcd(blocks[0], 8)
    return send and send.in_units(unit), recv and recv.in_units(unit)


def expect_able(call: Call) -> None:
    """Whether the call's algorithm can do what is asked for: the same on all ranks.

    Raises:
        UnknownAlgorithm: it cannot.
    """
    name, _ = parse(call.algorithm)
    if name in ("auto", "native"):
        return
    if name == "nccl":
        if fault := extras.fault_of_nccl(call):
            raise UnknownAlgorithm(f"{call.collective}: {fault}")
        return
    entry = find(call.collective, name)
    if call.op is not None and not call.op.is_commutative and not entry.keeps_order:
        raise UnknownAlgorithm(
            f"{name} does not keep rank order, which this operation needs because it does not "
            "commute; use 'native' or one that 'python -m collectives list' says keeps it"
        )
    if call.counts is not None and not entry.uneven:
        raise UnknownAlgorithm(
            f"{name} needs blocks of equal length; use 'native' or another {call.collective}"
        )


#: The buffers of each v-variant that have a block for each rank.
_VECTORS = {
    "allgather": ("receive",),
    "alltoall": ("send", "receive"),
    "gather": ("receive",),
    "scatter": ("send",),
}


def _buffer(
    arguments: Arguments, spec: Any, role: str, blocks: int, member: Member
) -> CallBuffer | None:
    if not blocks or spec is None or spec is MPI.IN_PLACE:
        return None
    if arguments.vector and role in _VECTORS.get(arguments.collective, ()):
        return vector_buffer(spec, role, blocks)
    if arguments.vector and arguments.collective == "reduce_scatter":
        blocks = 1  # a count is that of all
    moves = not contract(arguments.collective).reduces
    reads = arguments.collective == "broadcast" and member.is_root
    return read_buffer(spec, role, blocks, moves=moves, readonly=reads)


def _counts(
    arguments: Arguments, member: Member, send: CallBuffer | None, recv: CallBuffer | None
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
    _expect_own_block(arguments.collective, member, sent, received)
    return Counts(sent, received)


def _expect_own_block(
    collective: str, member: Member, sent: tuple[int, ...], received: tuple[int, ...]
) -> None:
    """Refuses a rank's block to itself whose two lengths differ.  Some MPI libraries raise on this
    rank alone while the others wait, and some say nothing."""
    block = contract(collective).block
    if block is None:
        return
    known = {block(member, "sendbuf", j): nbytes for j, nbytes in enumerate(sent)}
    for j, nbytes in enumerate(received):
        own = known.get(block(member, "recvbuf", j), nbytes)
        if own != nbytes:
            raise InvalidBuffer(
                f"{collective}: rank {member.rank} sends {own} bytes to itself and receives "
                f"{nbytes}; make the counts equal"
            )


def _lengths(buffer: CallBuffer | None) -> tuple[int, ...]:
    if buffer is None:
        return ()
    return (buffer.items.size,) if buffer.counts is None else buffer.counts


def _expect(role: str, buffer: CallBuffer | None, items: int) -> None:
    if buffer is not None and buffer.items.size != items:
        size = buffer.items.itemsize
        raise InvalidBuffer(
            f"the {role} buffer has {buffer.items.size * size} bytes, but the counts say "
            f"{items * size}"
        )


def _recvcounts(arguments: Arguments, member: Member) -> tuple[int, ...]:
    try:
        counts = tuple(map(index, () if arguments.recvcounts is None else arguments.recvcounts))
    except TypeError:
        counts = (-1,)
    if len(counts) != member.size or min(counts) < 0:
        raise InvalidBuffer(
            f"reduce_scatter: recvcounts are {member.size} numbers from 0 on, one for each rank, "
            f"not {arguments.recvcounts!r}"
        )
    return counts


def _input_where_the_result_goes(
    arguments: Arguments, member: Member
) -> tuple[CallBuffer, CallBuffer]:
    """Reduce-scatter in place: the result goes to the beginning of the input."""
    if arguments.vector:
        if arguments.recvcounts is None:
            raise InvalidBuffer("reduce_scatter in place needs recvcounts, one for each rank")
        whole = read_buffer(arguments.recvbuf, "receive")
        own = _recvcounts(arguments, member)[member.rank]
        return whole, replace(whole, items=whole.items[:own])
    whole = read_buffer(arguments.recvbuf, "receive", member.size)
    return whole, replace(whole, items=whole.items[: whole.items.size // member.size])


def _with_type(buffer: CallBuffer) -> CallBuffer:
    """Items that MPI has no type for as bytes, so that the library's own collective can move them:
    other ranks, which may describe theirs by a type that it has, leave theirs to it as well."""
    lacks = buffer.datatype is None and not is_on_device(buffer.items)
    return replace(buffer, datatype=MPI.BYTE) if lacks else buffer


def _with_sure_words(
    arguments: Arguments, send: CallBuffer | None, recv: CallBuffer | None
) -> Arguments:
    """The buffers in words that mpi4py is sure to take: refused when the ranks have met already, a
    call could not be made again.

    Args:
        send, recv: the buffers that ``arguments`` names.
    """
    same = True
    if contract(arguments.collective).reduces and send is not None and recv is not None:
        same = send.datatype == recv.datatype
        recv = replace(recv, datatype=send.datatype)  # two names of one type become one
    if same and _takes(arguments.sendbuf, send) and _takes(arguments.recvbuf, recv):
        return arguments
    return arguments._replace(
        sendbuf=_sure_words(arguments.sendbuf, send), recvbuf=_sure_words(arguments.recvbuf, recv)
    )


def _takes(spec: Any, buffer: CallBuffer | None) -> bool:
    """Whether mpi4py takes it as it is; of long doubles that are not aligned, it knows no type."""
    return buffer is None or (nbytes_of(spec) is not None and buffer.items.flags.aligned)


def _sure_words(spec: Any, buffer: CallBuffer | None) -> Any:
    if buffer is None or buffer.datatype is None or buffer.memory is not HOST:
        return spec
    if not buffer.datatype.is_predefined or buffer.gaps or buffer.items.dtype == OPAQUE:
        return spec
    return buffer.of_type(buffer.datatype)
