"""What a trainer asks of the device that computes, and how the CPU answers."""

from collections.abc import Callable, Sequence
from time import perf_counter
from types import ModuleType
from typing import Protocol

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.arrays import Array, Scalar


class Later(Protocol):
    """A copy on its way to the host."""

    @property
    def done(self) -> bool:
        """Whether it is there."""

    def get(self) -> Array:
        """The host's array, once it is there; any thread may wait."""


class Device(Protocol):
    """A CPU or a GPU.

    On a GPU, work is queued: :meth:`get`, :meth:`read` and :meth:`clock` wait for it.

    Attributes:
        name: for people, as ``cpu`` or ``cuda:0 NVIDIA H100``.
        xp: ``numpy`` or ``cupy``.
    """

    name: str
    xp: ModuleType

    def put(self, host: Array) -> Array:
        """An array of the host, here; the CPU's is the same one."""

    def ahead(self, host: Array) -> Callable[[], Array]:
        """Begins to bring an array of the host, beside the work that is queued.

        The result gives the array: what is queued after that call comes after the copy.
        """

    def get(self, array: Array) -> Array:
        """An array from here, on the host; waits."""

    def number(self, scalar: Scalar) -> Scalar:
        """A scalar in float64."""

    def read(self, scalars: Sequence[Scalar]) -> list[float]:
        """Scalars as numbers of the host; waits once for all of them."""

    def bring(self, array: Array) -> Later:
        """An array that does not change any more, on its way to the host; does not wait."""

    def snapshot(self, array: Array) -> Later:
        """A copy of what an array holds now, on its way to the host; does not wait."""

    def allocate(self, comm: Communicator) -> Callable[..., Array]:
        """Makes arrays here where the ranks of ``comm`` sum best: ``allocate(size, dtype)``."""

    def add_up(self, comm: Communicator, array: Array) -> None:
        """A small array becomes its sum over the ranks; collective."""

    def clock(self) -> float:
        """Seconds, when all that was queued is done."""


class _Now:
    """A copy that is there."""

    done = True

    def __init__(self, array: Array) -> None:
        self._array = array

    def get(self) -> Array:
        return self._array


class Host:
    """The CPU: everything is here at once."""

    name = "cpu"
    xp: ModuleType = np

    def put(self, host: Array) -> Array:
        return host

    def ahead(self, host: Array) -> Callable[[], Array]:
        return lambda: host

    def get(self, array: Array) -> Array:
        return array

    def number(self, scalar: Scalar) -> Scalar:
        return float(scalar)

    def read(self, scalars: Sequence[Scalar]) -> list[float]:
        return [float(scalar) for scalar in scalars]

    def bring(self, array: Array) -> Later:
        return _Now(array)

    def snapshot(self, array: Array) -> Later:
        return _Now(array.copy())

    def allocate(self, comm: Communicator) -> Callable[..., Array]:
        return comm.empty

    def add_up(self, comm: Communicator, array: Array) -> None:
        comm.Allreduce(MPI.IN_PLACE, array, algorithm="native")

    def clock(self) -> float:
        return perf_counter()


#: There is one.
HOST = Host()
