"""CuPy's names on host memory: what is written for a GPU runs where there is none.

Put in the place of ``cupy`` in ``sys.modules``.  Every array says that it lies on a device, and so
takes the road through :mod:`collectives.execution.transport.device`; nothing is queued, that is
what ``tests/local/test_device_memory.py`` has a queue for.
"""

import ctypes
import mmap
import os
import struct
from types import SimpleNamespace

import numpy as np
from mpi4py import MPI


class ndarray(np.ndarray):
    """An array that says that it lies on a GPU."""

    def __new__(cls, shape, dtype=float, memptr=None):
        buffer = None
        if memptr is not None:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            buffer = MPI.buffer.fromaddress(memptr.ptr, nbytes)
        made = super().__new__(cls, shape, dtype, buffer)
        made.owner = memptr
        return made

    @property
    def __cuda_array_interface__(self):
        return self.__array_interface__

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])

    @property
    def device(self):
        return _Device()

    def get(self):
        return np.array(self)

    def set(self, values):
        if type(values) is not np.ndarray or values.dtype != self.dtype:
            raise TypeError(f"{type(values).__name__} of {values.dtype} into {self.dtype}")
        self[...] = values.reshape(self.shape)


def asarray(items):
    return np.asanyarray(items) if isinstance(items, ndarray) else np.array(items).view(ndarray)


def _made(name):
    """NumPy's function of that name; its arrays are ours."""
    return lambda *given, **named: getattr(np, name)(*given, **named).view(ndarray)


arange, empty, zeros, ones = map(_made, ("arange", "empty", "zeros", "ones"))
full_like, zeros_like = np.full_like, np.zeros_like


def asnumpy(items):
    return items.get()


def copyto(target, source, casting="same_kind"):
    if not (isinstance(target, ndarray) and isinstance(source, ndarray)):
        raise TypeError("CuPy copies between arrays on a device")
    np.copyto(target, source, casting=casting)


class _Nccl:
    """The few calls of NCCL that the benchmark makes, by MPI."""

    available = True
    NCCL_FLOAT32, NCCL_INT8, NCCL_SUM, NCCL_MAX = 7, 0, 0, 2

    class NcclCommunicator:
        def __init__(self, ndev, commId, rank):
            if (ndev, commId, rank) != (MPI.COMM_WORLD.size, ("unique",), MPI.COMM_WORLD.rank):
                raise ValueError("these ranks are not the job's")
            self.comm = MPI.COMM_WORLD.Dup()

        def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
            self.comm.Allreduce(*self._given(sendbuf, recvbuf, count, datatype), self._op(op))

        def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
            given = self._given(sendbuf, recvbuf, recvcount, datatype, sent=self.comm.size)
            self.comm.Reduce_scatter_block(*given, self._op(op))

        def allGather(self, sendbuf, recvbuf, count, datatype, stream):
            self.comm.Allgather(
                *self._given(sendbuf, recvbuf, count, datatype, received=self.comm.size)
            )

        def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
            _, received = self._given(sendbuff, recvbuff, count, datatype)
            self.comm.Bcast(received, root)

        def destroy(self):
            self.comm.Free()

        @staticmethod
        def _given(sendbuf, recvbuf, count, datatype, sent=1, received=1):
            kind = {7: MPI.FLOAT, 0: MPI.INT8_T}[datatype]

            def memory(address, blocks):
                nbytes = blocks * count * kind.Get_size()
                return [MPI.buffer.fromaddress(address, nbytes), count, kind]

            first = MPI.IN_PLACE if sendbuf == recvbuf else memory(sendbuf, sent)
            return first, memory(recvbuf, received)

        @staticmethod
        def _op(op):
            return {0: MPI.SUM, 2: MPI.MAX}[op]

    @staticmethod
    def get_unique_id():
        return ("unique",)


class _Memory:
    """An allocation, which other processes can map by the descriptor that the handle names."""

    def __init__(self, size):
        self.file = os.memfd_create("device memory")
        os.truncate(self.file, size)
        self.array, self.ptr = _mapped(self.file, size)
        _allocated[self.ptr] = self.file, size

    def __del__(self):
        os.close(_allocated.pop(self.ptr)[0])


def _mapped(file, size):
    array = np.frombuffer(mmap.mmap(file, size), np.uint8)
    return array, array.__array_interface__["data"][0]


#: By address: what this process has allocated, and what it has mapped of others'.
_allocated, mapped = {}, {}
_HANDLE = "iiq48x"


def _ipc_get(address):
    if address not in _allocated:
        raise RuntimeError("cudaErrorInvalidValue: not where an allocation begins")
    return struct.pack(_HANDLE, os.getpid(), *_allocated[address])


def _ipc_open(handle):
    process, file, size = struct.unpack(_HANDLE, handle)
    if process == os.getpid():
        raise RuntimeError("cudaErrorDeviceUninitialized: this process's own memory")
    theirs = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    array, address = _mapped(theirs, size)
    os.close(theirs)
    mapped[address] = array
    return address


class _Stream:
    ptr = 0
    done = True

    def synchronize(self):
        """Nothing is queued."""


class _Device:
    def __init__(self, number=0):
        # As if every rank had a GPU of its own.
        self.pci_bus_id = f"0000:{MPI.COMM_WORLD.rank:02x}:00.0"

    id = 0

    def use(self):
        """There is only one memory."""


cuda = SimpleNamespace(
    Device=_Device,
    get_current_stream=_Stream,
    alloc_pinned_memory=bytearray,
    Memory=_Memory,
    UnownedMemory=lambda ptr, size, owner, device_id: SimpleNamespace(ptr=ptr),
    MemoryPointer=lambda memory, offset: SimpleNamespace(ptr=memory.ptr + offset, mem=memory),
    nccl=_Nccl,
    runtime=SimpleNamespace(
        CUDARuntimeError=RuntimeError,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda number: {"name": b"no GPU at all"},
        memcpyAsync=lambda target, source, size, kind, stream: ctypes.memmove(target, source, size),
        memcpyDefault=4,
        ipcGetMemHandle=_ipc_get,
        ipcOpenMemHandle=_ipc_open,
        ipcCloseMemHandle=lambda address: mapped.pop(address),
    ),
)


def __getattr__(name):
    """NumPy's functions, whose results are as their arguments; the types, too."""
    return getattr(np, name)
