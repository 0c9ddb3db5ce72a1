"""The kinds of memory that arrays lie in, as plans use them; NumPy's on the host.

A GPU's memory is :mod:`collectives.execution.transport.cuda_memory`.  Work there is queued on a
stream and done later, so MPI must not read or write it before the stream has come that far; that
is the business of gates (:mod:`collectives.execution.device_plan`).
"""

import ctypes
import os
import sys
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collectives.execution.transport.cuda_memory import CudaMemory

Items = npt.NDArray[Any]

#: Stores across the ends of cache lines take NumPy's loops twice as long; below so many bytes, a
#: second call takes longer than they do.
_LINE, _LONG = 64, 32 << 10


class Combine(Protocol):
    """A reduction of two arrays, as NumPy's functions are."""

    def __call__(self, left: Items, right: Items, /, *, out: Items) -> object:
        """Puts ``left (op) right`` into ``out``, which may be either of them."""


#: Kinds of numbers that operations take (MPI 4.1, section 6.9.2), as NumPy's kind letters; ``V``
#: is of ml_dtypes' bfloat16 and its relatives.
_NUMBER, _REAL, _LOGICAL, INTEGER = "iufcV", "iufV", "iub", "iu"
#: NumPy's function of an operation, and the kinds of numbers that it takes, by MPI's name in small
#: letters.
OPERATIONS: dict[str, tuple[np.ufunc, str]] = {
    "sum": (np.add, _NUMBER),
    "prod": (np.multiply, _NUMBER),
    "max": (np.maximum, _REAL),
    "min": (np.minimum, _REAL),
    "land": (np.logical_and, _LOGICAL),
    "lor": (np.logical_or, _LOGICAL),
    "lxor": (np.logical_xor, _LOGICAL),
    "band": (np.bitwise_and, INTEGER),
    "bor": (np.bitwise_or, INTEGER),
    "bxor": (np.bitwise_xor, INTEGER),
}


class HostMemory:
    """NumPy's arrays."""

    @staticmethod
    def empty(count: int, dtype: "np.dtype[Any]") -> Items:
        """A new 1-D array."""
        return np.empty(count, dtype)

    @staticmethod
    def zeros(shape: Any, dtype: npt.DTypeLike) -> Items:
        """A new array of zeros."""
        return np.zeros(shape, dtype)

    #: Copies between arrays of one type.  As it is: many copies take less time than a Python
    #: function in between would.
    copy = staticmethod(np.copyto)

    @staticmethod
    def convert(target: Items, source: Items) -> None:
        """Copies between arrays that may differ in their type."""
        if target.dtype == source.dtype:
            np.copyto(target, source)
        else:
            _quiet().run(np.copyto, target, source, casting="unsafe")

    @staticmethod
    def address(items: Items) -> int:
        """Where an array begins."""
        address: int = items.__array_interface__["data"][0]
        return address

    @staticmethod
    def combine(function: Combine) -> Combine:
        """A reduction for arrays of this memory.

        It runs in a context of its own, where no overflow raises or warns, whatever the caller's
        ``np.errstate``: MPI's operations never do, and a rank that raised alone would leave the
        others waiting.
        """
        if not isinstance(function, np.ufunc):
            return function
        return partial(_quiet().run, function)

    @staticmethod
    def reduction(combine: Combine, left: Items, right: Items, out: Items) -> Callable[[], object]:
        """The call that puts ``left (op) right`` into ``out``; ``combine`` is this memory's.

        It reduces in two parts, so that all but the first few stores begin with a cache line:
        malloc's large blocks begin 16 bytes behind one.
        """
        size = out.itemsize
        if out.nbytes >= _LONG and _LINE % size == 0:
            head, between = divmod(-HostMemory.address(out) % _LINE, size)
            if head and not between:
                first = partial(combine, left[:head], right[:head], out=out[:head])
                rest = partial(combine, left[head:], right[head:], out=out[head:])
                return partial(_both, first, rest)
        return partial(combine, left, right, out=out)

    @staticmethod
    def borrowed(items: Items) -> Items:
        """The array's memory by address: whoever uses it must know that it is still there."""
        if not items.nbytes:
            return np.empty(0, items.dtype)
        memory: Any = (ctypes.c_byte * items.nbytes).from_address(HostMemory.address(items))
        return np.frombuffer(memory, items.dtype)


def _both(first: Callable[[], object], rest: Callable[[], object]) -> None:
    first()
    rest()


def _quiet() -> Context:
    """A context in which arithmetic neither raises nor warns; one thread at a time can be in it."""
    quiet = Context()
    quiet.run(np.seterr, all="ignore")
    return quiet


HOST = HostMemory()
#: The memory of one kind; a GPU's has the host's operations and more.
Memory: TypeAlias = "HostMemory | CudaMemory"


def is_queued(memory: Memory) -> "TypeGuard[CudaMemory]":
    """Whether work on it is queued, as a GPU's is."""
    return not isinstance(memory, HostMemory)


def is_on_device(array: object) -> bool:
    """Whether an array lies on a GPU.

    CUDA's array interface alone does not say so: host memory may have it, too.
    """
    if isinstance(array, np.ndarray):
        return False
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return True
    if torch is not None and isinstance(array, torch.Tensor):
        return bool(array.is_cuda)  # its array interface raises where gradients are recorded
    try:
        address = array.__cuda_array_interface__["data"][0]  # type: ignore[attr-defined]
    except AttributeError:
        return False
    return _is_device_address(address)


def gpu_of(items: Items) -> int | None:
    """The number of the GPU that NumPy's or CuPy's array lies on; ``None`` on the host."""
    if isinstance(items, np.ndarray):
        return None
    gpu: int = items.device.id
    return gpu


def _is_device_address(address: int) -> bool:
    """As CUDA's driver says; in a process that has not loaded it, there is no GPU's memory."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    kind = ctypes.c_uint(0)
    memory_type, on_device = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE
    status = driver.cuPointerGetAttribute(
        ctypes.byref(kind), memory_type, ctypes.c_ulonglong(address)
    )
    return status == 0 and kind.value == on_device
