"""The memory of what mpi4py takes for an array: buffer protocol, DLPack, CUDA's interface; shapes
and types of new arrays."""

import ctypes
import sys
from math import prod
from operator import index
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.errors import INSTALL_CUPY, InvalidBuffer, InvalidBufferType, install
from collectives.execution.memory import Items, is_on_device


def memory_of(data: Any, typed: bool, role: str, readonly: bool, moves: bool = True) -> Items:
    """A 1-D view of what the caller passed.

    Args:
        typed: the caller names an MPI type, so that the view may be of bytes.
        moves: the collective only moves data, so that numbers of unknown types will do.
    """
    if data is None or data is MPI.BOTTOM:
        if not typed:
            raise InvalidBuffer(f"the {role} buffer is None; pass an array, or [None, 0, type]")
        return np.empty(0, np.uint8)
    if is_on_device(data):
        return _device_array(data, role)
    array = _flat(_host_array(data, typed, role, readonly, moves), role, "np")
    if array.dtype.hasobject:
        raise InvalidBuffer(f"the {role} buffer holds Python objects; use the lower-case method")
    if not (readonly or array.flags.writeable):
        raise InvalidBuffer("the receive buffer is read-only; pass a writable array")
    return array


def _flat(array: npt.NDArray[Any], role: str, library: str) -> npt.NDArray[Any]:
    """A 1-D view of an array of ``np`` or ``cupy``."""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise InvalidBuffer(
            f"the {role} buffer is not contiguous (shape {array.shape}, strides {array.strides}); "
            f"pass {library}.ascontiguousarray(array)"
        )
    return array.reshape(-1, order="A")


def _host_array(data: Any, typed: bool, role: str, readonly: bool, moves: bool) -> npt.NDArray[Any]:
    """NumPy's own kind of array on the memory of anything that mpi4py takes."""
    if isinstance(data, np.ndarray):
        return np.asarray(data)  # a subclass's memory as an ordinary array
    try:
        return np.asarray(memoryview(data))
    except TypeError:
        pass
    try:
        if _is_negated(data):
            raise BufferError("it is a view that negates; pass tensor.resolve_neg()")
        memory: Any = MPI.buffer.frombuffer(data, readonly=readonly)
        raw = np.frombuffer(memory, np.uint8)
    except (NotImplementedError, TypeError):
        raise InvalidBufferType(
            f"the {role} buffer is a {type(data).__name__}; pass an array or another object with "
            "the buffer protocol"
        ) from None
    except (BufferError, ValueError, RuntimeError) as error:
        raise InvalidBuffer(
            f"the {role} buffer, a {type(data).__name__}, gives no access: {error}"
            f"{_way_out(str(error), readonly)}"
        ) from None
    return raw if typed else raw.view(_exported(data, moves))


def _is_negated(data: Any) -> bool:
    """Whether it is a tensor of torch whose memory has the numbers with another sign."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.Tensor) and data.is_neg()


def _way_out(error: str, readonly: bool) -> str:
    """The method to call on a tensor that its library gives no access to."""
    back = "" if readonly else ", and copy it back"
    for reason, method in (("contiguous", "contiguous"), ("conjugate", "resolve_conj")):
        if reason in error:
            return f"; pass tensor.{method}(){back}"
    return ""


def _exported(data: Any, moves: bool) -> "np.dtype[Any]":
    """The type of what comes by DLPack or CUDA's array interface.

    Raises:
        InvalidBuffer: neither NumPy nor ml_dtypes has it, and its bytes alone are not enough.
    """
    if not hasattr(data, "__dlpack__"):
        return np.dtype(data.__cuda_array_interface__["typestr"])
    # NumPy's own reader knows neither long doubles nor arrays of nothing.
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = data.__dlpack__()
    tensor = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    nbytes = tensor.bits * tensor.lanes // 8
    kind = _DLPACK_KINDS.get((tensor.code, tensor.lanes))
    if kind is not None and (kind != "c" or nbytes >= 8):
        return np.dtype(f"{kind}{nbytes}")
    if moves:
        return np.dtype((np.void, nbytes))
    name = _SMALL_FLOATS.get(tensor.code)
    if name is None:
        called = getattr(data, "dtype", f"DLPack's type {tensor.code}")
        raise InvalidBuffer(f"NumPy has no type for numbers of {called}; reduce others")
    return small_float(name)


def small_float(name: str) -> "np.dtype[Any]":
    """The type of ml_dtypes of this name.

    Raises:
        InvalidBuffer: it has none, or is not there.
    """
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError):
        raise InvalidBuffer(
            f"numbers of {name} take ml_dtypes: {install('ml_dtypes', 'bfloat16')}"
        ) from None


def read_shape(shape: Any, dtype: "np.dtype[Any]") -> tuple[int, ...]:
    lengths = tuple(map(index, shape)) if np.iterable(shape) else (index(shape),)
    # NumPy multiplies those of an array without items, too.
    items = prod(max(1, length) for length in lengths)
    if min(lengths, default=0) < 0 or items * dtype.itemsize >= 1 << 62:
        raise InvalidBuffer(f"{shape!r} is no shape of an array")
    np.empty((0,) * len(lengths), dtype)  # raises for too many dimensions
    return lengths


def read_type(dtype: Any) -> "np.dtype[Any]":
    name = str(dtype)
    if name.startswith("torch."):
        dtype = name = name.removeprefix("torch.")
    kind = small_float(name) if name.startswith(("bfloat", "float8")) else np.dtype(dtype)
    if kind.hasobject or not kind.itemsize:
        raise InvalidBuffer(f"arrays of {kind} cannot be shared between processes")
    return kind


class _DLTensor(ctypes.Structure):
    """The beginning of DLPack's structure of that name."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    ]


#: DLPack's kinds of numbers and how many make an item, in NumPy's letters.
_DLPACK_KINDS = {(0, 1): "i", (1, 1): "u", (2, 1): "f", (2, 2): "c", (5, 1): "c", (6, 1): "b"}
#: DLPack's kinds of small floating-point numbers, by ml_dtypes' names.
_SMALL_FLOATS = {
    4: "bfloat16",
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
}


def _device_array(data: Any, role: str) -> npt.NDArray[Any]:
    """CuPy's view of device memory, whoever allocated it."""
    try:
        import cupy
    except ImportError:
        raise InvalidBuffer(
            f"the {role} buffer lies on a GPU, which needs CuPy: {INSTALL_CUPY}, or copy it to the "
            "host first"
        ) from None
    array = data if isinstance(data, cupy.ndarray) else _adopted(cupy, data)
    return _flat(array, role, "cupy")


def _adopted(cupy: ModuleType, data: Any) -> Any:
    """Another library's memory as CuPy's, in the order of both libraries' streams.

    By DLPack, as CUDA's array interface says no type for bfloat16, and of PyTorch's no stream.
    """
    if not hasattr(data, "__dlpack_device__"):
        return cupy.asarray(data)
    _, gpu = data.__dlpack_device__()
    with cupy.cuda.Device(gpu):
        # PyTorch gives no memory away whose gradients it records; a collective records none.
        return cupy.from_dlpack(data.detach() if hasattr(data, "detach") else data)
