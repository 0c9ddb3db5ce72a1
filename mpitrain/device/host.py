"""The device that computes: the CPU; :mod:`.cuda` has the GPU."""

import resource
from collections.abc import Callable, Sequence
from time import perf_counter
from types import ModuleType
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.arrays import Array, Scalar
from mpitrain.kernels import kernels_of


class Later:
    """Copy on its way to the host; on the CPU it has arrived."""

    def __init__(self, host: Array) -> None:
        self._host = host

    @property
    def done(self) -> bool:
        """Whether it has arrived."""
        return True

    def get(self) -> Array:
        """The host's array; waits until it has arrived, in any thread."""
        return self._host


class Device:
    """The CPU, and what a GPU replaces (:class:`mpitrain.device.cuda.Cuda`).

    On a GPU, work is queued: :meth:`get`, :meth:`read` and :meth:`clock` wait for it.

    Attributes:
        name: for people, as ``cpu`` or ``cuda:0 NVIDIA H100``.
        xp: ``numpy`` or ``cupy``.
    """

    name: str = "cpu"
    xp: ModuleType = np

    def put(self, host: Array) -> Array:
        """Brings an array of the host to the device; the CPU returns the same array."""
        return host

    def ahead(self, host: Array) -> Callable[[], Array]:
        """Begins to bring an array of the host, beside the work that is queued.

        The result is a function that returns the array; work queued after its call waits for the
        copy.
        """
        return lambda: host

    def get(self, array: Array) -> Array:
        """An array of the device, on the host; waits."""
        return array

    def number(self, scalar: Scalar) -> Scalar:
        """A scalar as float64."""
        return float(scalar)

    def read(self, scalars: Sequence[Scalar]) -> list[float]:
        """Scalars as numbers on the host; waits once for all of them."""
        return [float(scalar) for scalar in scalars]

    def bring(self, array: Array) -> Later:
        """Begins to copy an array that will not change to the host."""
        return Later(array)

    def snapshot(self, array: Array) -> Later:
        """Begins to copy the present values of an array to the host."""
        return Later(array.copy())

    def allocate(self, comm: Communicator) -> Callable[..., Array]:
        """Allocator ``(size, dtype)`` of arrays that the ranks of ``comm`` sum fastest."""
        return comm.empty

    def add_up(self, comm: Communicator, array: Array) -> None:
        """Sums a small array over the ranks in place; collective."""
        comm.Allreduce(MPI.IN_PLACE, array, algorithm="native")

    def memory(self) -> float:
        """Most bytes that this process has had so far, on a GPU there."""
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def peak(self, comm: MPI.Intracomm, dtype: Any) -> float:
        """Operations a second of all ranks at once in layers' products of matrices; collective."""
        size, seconds = 1024 if self.xp is np else 8192, []
        matrix = self.put(np.ones((size, size), dtype))
        comm.Barrier()
        for _ in range(5):
            start = self.clock()
            kernels_of(matrix).matmul(matrix, matrix)
            seconds.append(self.clock() - start)
        return comm.allreduce(2.0 * size**3 / min(seconds))

    def clock(self) -> float:
        """Seconds on a clock, after all queued work is done."""
        return perf_counter()


HOST = Device()
