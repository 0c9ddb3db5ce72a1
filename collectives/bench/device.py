"""Measurements on GPUs: a GPU for each rank, and the MPI library's row."""

from typing import Any

from mpi4py import MPI

from collectives.calls.arguments import Arguments
from collectives.calls.engine import AnyPlan
from collectives.calls.native_plan import NativePlan
from collectives.calls.nccl import Nccl, all_or_none
from collectives.errors import INSTALL_CUPY
from collectives.execution.memory import Items
from collectives.execution.transport.cuda_memory import CudaMemory
from collectives.execution.transport.cuda_probe import probe


def use_own_gpu(comm: MPI.Intracomm) -> str:
    """Makes one of the node's GPUs current, in turn by rank; returns its name.  Collective.

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
        trouble = f"no CuPy ({error}): {INSTALL_CUPY}"
    all_or_none(comm, trouble)
    return name


def check_device_messages(comm: MPI.Intracomm) -> None:
    """Tries messages of device memory in child processes, as a failing MPI ends them.  Collective.

    Raises:
        CollectiveError: on all ranks, if they fail.
    """
    gpus = comm.gather(CudaMemory().gpu)
    works, seen = probe(*gpus[:2]) if gpus else (True, "")
    all_or_none(comm, "" if works else f"this MPI cannot send device memory: {seen}")


class ByTheHost:
    """The MPI library's collective on copies in pinned host memory.

    On device memory it would crash without a CUDA-aware MPI, and stage badly with one.
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
        """Specification of a copy on the host, and both arrays."""
        if spec is None or spec is MPI.IN_PLACE:
            return spec, None
        items, *rest = spec if isinstance(spec, list) else [spec]
        host = self._memory.pinned(items.nbytes).view(items.dtype)
        return [host, *rest], (host, items)

    def __call__(self) -> None:
        """Downloads, runs the collective and uploads."""
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


def check_nccl(comm: MPI.Intracomm) -> None:
    """Tries to make a communicator of NCCL.  Collective.

    Raises:
        CollectiveError: on all ranks, if one of them cannot.
    """
    Nccl(comm, CudaMemory().gpu).close()


#: A timed plan: ours, native's, or its substitute on device memory.
Row = AnyPlan | ByTheHost
