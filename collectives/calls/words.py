"""The words in which mpi4py is told of buffers, where the caller's own may not do."""

from dataclasses import replace
from typing import Any

from mpi4py import MPI

from collectives.calls.arguments import Arguments
from collectives.calls.buffers import Buffer
from collectives.calls.fast_path import nbytes_of
from collectives.contracts import contract
from collectives.execution.memory import HOST, is_on_device


def with_types(
    arguments: Arguments, send: Buffer | None, recv: Buffer | None
) -> tuple[Arguments, Buffer | None, Buffer | None]:
    """Items that MPI has no type for as bytes, so that the library's own collective can move them:
    other ranks, which may describe theirs by a type that it has, leave theirs to it as well."""
    if send is not None and _is_without_type(send):
        arguments = arguments._replace(sendbuf=send.of_type(MPI.BYTE))
        send = replace(send, datatype=MPI.BYTE)
    if recv is not None and _is_without_type(recv):
        arguments = arguments._replace(recvbuf=recv.of_type(MPI.BYTE))
        recv = replace(recv, datatype=MPI.BYTE)
    return arguments, send, recv


def with_sure_words(arguments: Arguments, send: Buffer | None, recv: Buffer | None) -> Arguments:
    """The buffers in words that mpi4py is sure to take: refused when the ranks have met already, a
    call could not be made again.

    Args:
        send, recv: what ``arguments`` names as such.
    """
    same = True
    if contract(arguments.collective).reduces and send is not None and recv is not None:
        same = send.datatype == recv.datatype
        recv = replace(recv, datatype=send.datatype)  # of two names of one type, one
    if same and _takes(arguments.sendbuf, send) and _takes(arguments.recvbuf, recv):
        return arguments
    return arguments._replace(
        sendbuf=_sure_words(arguments.sendbuf, send), recvbuf=_sure_words(arguments.recvbuf, recv)
    )


def _takes(spec: Any, buffer: Buffer | None) -> bool:
    """Whether mpi4py takes it as it is; of long doubles that are not aligned, it knows no type."""
    return buffer is None or (nbytes_of(spec) is not None and buffer.items.flags.aligned)


def _sure_words(spec: Any, buffer: Buffer | None) -> Any:
    if buffer is None or buffer.datatype is None or buffer.gaps or buffer.memory is not HOST:
        return spec
    return buffer.of_type(buffer.datatype)


def _is_without_type(buffer: Buffer) -> bool:
    return buffer.datatype is None and not is_on_device(buffer.items)
