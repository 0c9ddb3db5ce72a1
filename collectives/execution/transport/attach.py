"""Ordinary memory of another process of the node, read where it lies: Linux's cross-memory attach.

Nothing is moved into shared memory: a rank that needs what lies in another's buffer asks the kernel
to copy it (``process_vm_readv``), once, where a message through shared memory is copied twice.  The
kernel allows it between processes of one user, unless Yama, seccomp or a container forbids it; so
the ranks try it on one another first (:func:`expect_readable`), and decide together.

A peer reads only between the counts by which its owner says that the buffer may be read, as in
shared memory (:mod:`collectives.execution.attached`).
"""

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.errors import CollectiveError, InvalidBuffer
from collectives.execution.memory import HOST, Combine, HostMemory, Items
from collectives.execution.transport.pages import bytes_at
from collectives.execution.transport.windows import Window

#: What is read before it is reduced: half of a small level-2 cache, with the operand beside it.
PIECE_BYTES = 256 << 10
#: Of one call of the kernel's, which copies at most 2 GiB.
_MOST_BYTES = 1 << 30
_LINE = 64
_TOKEN = 32
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


class _Part(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read(process: int, source: int, target: int, nbytes: int) -> None:
    """Copies ``nbytes`` at address ``source`` of another process to ``target`` of this one.

    Raises:
        OSError: they cannot be read, or not all of them.
    """
    call = _kernels_read()
    for start in range(0, nbytes, _MOST_BYTES):
        length = min(_MOST_BYTES, nbytes - start)
        here, there = _Part(target + start, length), _Part(source + start, length)
        copied = call(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if copied < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if copied != length:
            raise OSError(errno.EFAULT, f"only {copied} of {length} bytes can be read")


@cache
def _kernels_read() -> Callable[..., int]:
    """The call of the C library's.

    Raises:
        OSError: it has none.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    call = libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    parts, count = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = [ctypes.c_int, parts, count, parts, count, count]
    return call


class PeerItems(NamedTuple):
    """An array of another process; as much of NumPy's as a binder needs to cut it.

    Attributes:
        rank: whose it is; ``process`` is its number.
        address: where it begins there.
    """

    rank: int
    process: int
    address: int
    size: int
    dtype: "np.dtype[Any]"

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def part(self, start: int, stop: int) -> "PeerItems":
        """Items ``start`` to ``stop``, which it has."""
        address = self.address + start * self.dtype.itemsize
        return self._replace(address=address, size=stop - start)

    def __getitem__(self, items: Any) -> Any:
        start, stop, _ = items.indices(self.size)
        return self.part(start, max(start, stop))


class PeerMemory(Window):
    """The ranks' whole memory as a window: places in it are addresses."""

    def __init__(self, rank: int, processes: Sequence[int]) -> None:
        self.rank = rank
        self.memory = HOST
        self.address = self.nbytes = 0
        self.lent = None
        self.processes = processes

    def items(self, rank: int, address: int, count: int, dtype: "np.dtype[Any]") -> Any:
        """``count`` items at an address of ``rank``; of this rank, without keeping them alive."""
        if rank == self.rank:
            return bytes_at(address, count * dtype.itemsize, keeps=None).view(dtype)
        return PeerItems(rank, self.processes[rank], address, count, dtype)

    def end(self) -> None:
        """Nothing is held."""


def expect_readable(comm: MPI.Intracomm) -> PeerMemory:
    """The ranks of ``comm``, all on one node, once each has read memory of each other.  Collective.

    Raises:
        InvalidBuffer: on all ranks, if one cannot read another's.
    """
    token = np.frombuffer(os.urandom(_TOKEN), np.uint8)
    told = comm.allgather((os.getpid(), HOST.address(token), token.tobytes()))
    found, problems = np.empty(_TOKEN, np.uint8), []
    for rank, (process, address, wanted) in enumerate(told):
        if rank == comm.rank:
            continue
        try:
            read(process, address, HOST.address(found), _TOKEN)
            if found.tobytes() != wanted:
                raise OSError(errno.ESRCH, "its process number names another process here")
        except OSError as error:
            problems.append(f"rank {comm.rank} cannot read rank {rank}'s: {_why(error)}")
            break
    everywhere = [text for texts in comm.allgather(problems) for text in texts]
    del token  # which all have read
    if everywhere:
        raise InvalidBuffer("; ".join(everywhere[:3]))
    return PeerMemory(comm.rank, [process for process, _, _ in told])


def _why(error: OSError) -> str:
    """In words, with what to do."""
    if error.errno == errno.EPERM:
        scope = _YAMA.read_text().strip() if _YAMA.exists() else "0"
        if scope != "0":
            return (
                f"{error.strerror}: kernel.yama.ptrace_scope is {scope}; the machine's "
                "administrator can set it to 0"
            )
        return f"{error.strerror}: another user, a container or its seccomp filter forbids it"
    if error.errno == errno.ESRCH:
        return f"{error.strerror}: the ranks are in containers with process numbers of their own"
    if error.errno == errno.ENOSYS:
        return f"{error.strerror}: this kernel, or a filter, has no process_vm_readv"
    return str(error.strerror)


class AttachedMemory(HostMemory):
    """The host's memory, with operands that lie in other processes; one for each plan.

    A read that fails does not raise where it is done, as the other ranks would wait for this one:
    it is kept in ``failed``, nothing more is read in this run, and the ranks raise together at its
    end.  Where the other process is gone, there is nobody to agree with, and it raises at once.
    """

    def __init__(self) -> None:
        self.failed: tuple[int, OSError] | None = None
        self._room = np.empty(0, np.uint8)

    def begin(self) -> None:
        """A run begins."""
        self.failed = None

    def read(self, target: Items, source: PeerItems) -> None:
        """Copies from another process, unless a read has failed."""
        if self.failed is not None:
            return
        try:
            read(source.process, source.address, HOST.address(target), source.nbytes)
        except OSError as error:
            if error.errno == errno.ESRCH:
                raise CollectiveError(
                    f"rank {source.rank} is gone: its process {source.process} has ended"
                ) from error
            self.failed = source.rank, error

    def copy(self, target: Items, source: Any) -> None:  # type: ignore[override]
        if isinstance(source, PeerItems):
            self.read(target, source)
        else:
            np.copyto(target, source)

    def reduction(  # type: ignore[override]
        self, combine: Combine, left: Any, right: Any, out: Items
    ) -> Callable[[], object]:
        """In pieces, each of which is read and reduced while it is in the cache."""
        operands = left, right
        theirs = [one for one in operands if isinstance(one, PeerItems)]
        if not theirs:
            return HOST.reduction(combine, left, right, out)
        (remote,) = theirs
        calls: list[Callable[[], object]] = []
        for start, stop in _pieces(out):
            arrived = self._arrived((stop - start) * out.itemsize).view(out.dtype)
            here = [arrived if one is remote else one[start:stop] for one in operands]
            calls.append(partial(self.read, arrived, remote.part(start, stop)))
            calls.append(HOST.reduction(combine, here[0], here[1], out[start:stop]))
        return partial(_all, calls)

    def _arrived(self, nbytes: int) -> Items:
        """Room for a piece; all pieces take turns in it."""
        if self._room.nbytes < nbytes:
            self._room = np.empty(max(nbytes, PIECE_BYTES + _LINE), np.uint8)
        return self._room[:nbytes]


def _pieces(out: Items) -> list[tuple[int, int]]:
    """Where each begins and ends: all but the first begin with a cache line of ``out``."""
    size = out.itemsize
    head = -HOST.address(out) % _LINE // size if _LINE % size == 0 else 0
    step = max(1, PIECE_BYTES // size)
    cuts = [0, *range(head + step, out.size, step), out.size]
    return [*pairwise(cuts)]


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def can_be_read(address: int, nbytes: int) -> bool:
    """Whether the kernel reads the first and the last byte of memory of this process.

    Pages of a device's driver, for one, it does not.
    """
    found = np.empty(1, np.uint8)
    try:
        for byte in (address, address + nbytes - 1) if nbytes else ():
            read(os.getpid(), byte, HOST.address(found), 1)
    except OSError:
        return False
    return True
