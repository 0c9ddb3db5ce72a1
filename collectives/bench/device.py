"""Rows beside ours on device memory: the MPI library's by way of the host, and NCCL's."""

from functools import partial
from typing import Any

from mpi4py import MPI

from collectives.calls.arguments import Arguments
from collectives.calls.engine import AnyPlan
from collectives.calls.native import NativePlan
from collectives.errors import CollectiveError
from collectives.execution.memory import Items
from collectives.execution.transport.cuda_memory import CudaMemory
from collectives.execution.transport.cuda_probe import probe

_INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def use_own_gpu(comm: MPI.Intracomm) -> str:
    """Makes one of the node's GPUs the current one, in turn by rank; its name.  Collective.

    Raises:
        CollectiveError: on all ranks, if one of them has no CuPy or no GPU.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    mine = node.rank
    node.Free()
    name, trouble = "", ""
    try:
        import cupy

        try:
            gpu = mine % cupy.cuda.runtime.getDeviceCount()
            cupy.cuda.Device(gpu).use()
            name = cupy.cuda.runtime.getDeviceProperties(gpu)["name"].decode()
        except (cupy.cuda.runtime.CUDARuntimeError, ZeroDivisionError) as error:
            trouble = f"no GPU: {error}"
    except ImportError as error:
        trouble = f"no CuPy ({error}): pip install 'mpitrain[cuda13]' or cuda12"
    _all_or_none(comm, trouble)
    return name


def check_device_messages(comm: MPI.Intracomm) -> None:
    """Sends device memory in a child process, which an MPI that cannot do so ends.  Collective.

    Raises:
        CollectiveError: on all ranks, where that does not work.
    """
    works, seen = probe() if comm.rank == 0 else (True, "")
    _all_or_none(comm, "" if works else f"this MPI cannot send device memory: {seen}")


def _all_or_none(comm: MPI.Intracomm, trouble: str) -> None:
    for rank, told in enumerate(comm.allgather(trouble)):
        if told:
            raise CollectiveError(f"rank {rank}: {told}")


class ByTheHost:
    """The MPI library's collective on copies in pinned host memory, as one writes it by hand.

    On device memory itself it crashes where MPI is not CUDA-aware, and stages badly where it is.
    """

    algorithm = "native"
    reason = "by way of the host"

    def __init__(self, comm: MPI.Intracomm, arguments: Arguments) -> None:
        self._memory = CudaMemory()
        send, self._sent = self._on_host(arguments.sendbuf)
        recv, self._received = self._on_host(arguments.recvbuf)
        if arguments.sendbuf is MPI.IN_PLACE:
            self._sent = self._received
        arguments = arguments._replace(sendbuf=send, recvbuf=recv)
        self._native = NativePlan(comm, arguments, self.reason)

    def _on_host(self, spec: Any) -> tuple[Any, tuple[Items, Items] | None]:
        """The specification of a copy on the host, and the two arrays."""
        if spec is None or spec is MPI.IN_PLACE:
            return spec, None
        items, *rest = spec if isinstance(spec, list) else [spec]
        host = self._memory.pinned(items.nbytes).view(items.dtype)
        return [host, *rest], (host, items)

    def __call__(self) -> None:
        """Down, the collective, and up again."""
        self.Start()
        self.Wait()

    def Start(self) -> None:
        if self._sent:
            self._memory.download(*self._sent)
            self._memory.synchronize()
        self._native.Start()

    def Test(self) -> bool:
        if not self._native.Test():
            return False
        self._up()
        return True

    def Wait(self) -> None:
        self._native.Wait()
        self._up()

    def _up(self) -> None:
        if self._received:
            host, items = self._received
            self._memory.upload(items, host)

    def Free(self) -> None:
        """Nothing to release."""


class Nccl:
    """NCCL among ranks with a GPU each, on the stream that is current at each call.  Collective.

    Raises:
        CollectiveError: on all ranks, where two of them share a GPU or CuPy has no NCCL.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        import cupy

        self.cupy = cupy
        nccl = cupy.cuda.nccl
        _all_or_none(comm, "" if nccl.available else "this CuPy has no NCCL")
        gpu = (MPI.Get_processor_name(), cupy.cuda.Device().pci_bus_id)
        gpus = comm.allgather(gpu)
        if len(set(gpus)) < comm.size:
            raise CollectiveError(
                f"NCCL needs a GPU for each rank, and {comm.size} ranks have {len(set(gpus))}; "
                "start as many as there are GPUs"
            )
        unique = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None)
        self.channel = nccl.NcclCommunicator(comm.size, unique, comm.rank)

    def close(self) -> None:
        """Destroys NCCL's communicator."""
        self.channel.destroy()

    def constant(self, name: str) -> int:
        """``NCCL_<name>``."""
        value: int = getattr(self.cupy.cuda.nccl, f"NCCL_{name}")
        return value


class NcclPlan:
    """One collective on one pair of buffers; out of place, where its blocks are more than one."""

    algorithm = "nccl"
    reason = "asked for"

    def __init__(self, nccl: Nccl, arguments: Arguments) -> None:
        self._stream = nccl.cupy.cuda.get_current_stream
        recv = _items(arguments.recvbuf)
        in_place = arguments.sendbuf is MPI.IN_PLACE or arguments.sendbuf is None
        send = recv if in_place else _items(arguments.sendbuf)
        dtype = recv.dtype.name
        operations = (
            (None, ""),
            (MPI.SUM, "SUM"),
            (MPI.PROD, "PROD"),
            (MPI.MAX, "MAX"),
            (MPI.MIN, "MIN"),
        )
        op = next((name for operation, name in operations if operation == arguments.op), None)
        if op is None or dtype not in (*_INTEGERS, *_FLOATS):
            raise CollectiveError(f"NCCL reduces no {dtype} by this operation; leave it out")
        kind = nccl.constant(dtype.upper())
        reduction = nccl.constant(op) if op else 0
        memory, channel = (send.data.ptr, recv.data.ptr), nccl.channel
        match arguments.collective, in_place:
            case "allreduce", _:
                self._call = partial(channel.allReduce, *memory, recv.size, kind, reduction)
            case "reduce_scatter", False:
                self._call = partial(channel.reduceScatter, *memory, recv.size, kind, reduction)
            case "allgather", False:
                self._call = partial(channel.allGather, *memory, send.size, kind)
            case "broadcast", _:
                self._call = partial(channel.broadcast, *memory, recv.size, kind, arguments.root)
            case collective, _:
                place = " in place" if in_place else ""
                raise CollectiveError(f"there is no row of NCCL for {collective}{place}")

    def __call__(self) -> None:
        """Queues it: done when the stream has come so far."""
        self._call(self._stream().ptr)

    def Start(self) -> None:
        self()

    def Test(self) -> bool:
        done: bool = self._stream().done
        return done

    def Wait(self) -> None:
        self._stream().synchronize()

    def Free(self) -> None:
        """Nothing to release."""


#: What is timed: a plan of ours or native's, or what takes its place on device memory.
Row = AnyPlan | ByTheHost | NcclPlan


def _items(spec: Any) -> Any:
    return spec[0] if isinstance(spec, list) else spec
