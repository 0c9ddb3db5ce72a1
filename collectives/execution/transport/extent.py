"""Where the memory of an array lies, and what ends before that memory is freed."""

import ctypes
import sys
from mmap import PAGESIZE
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
from numpy._core._multiarray_umath import _ARRAY_API  # type: ignore[import-not-found]

from collectives.errors import InvalidBuffer
from collectives.execution.memory import HOST, is_on_device
from collectives.execution.transport.pages import regions

#: Place of ``PyArray_SetBaseObject`` in NumPy's table of C functions, in which none may move.
_SET_BASE_OBJECT = 282


class Ending:
    """The base of an array that owns its memory.

    NumPy lets go of an array's base before it frees the array's memory.  Weak references to the
    array itself are cleared before that up to NumPy 2.4, and since 2.5 after it, when another
    thread may have the memory already.
    """

    __slots__ = ("__weakref__",)


class Extent(NamedTuple):
    """Memory of an array: where it is, and the array or storage that it belongs to."""

    address: int
    nbytes: int
    owner: Any

    @property
    def margin(self) -> int:
        """Bytes between the start of its first page and its own start."""
        return self.address % PAGESIZE

    @property
    def pages(self) -> tuple[int, int]:
        """Where its first whole page begins and its last one ends; the same if there is none."""
        first = -(-self.address // PAGESIZE) * PAGESIZE
        last = (self.address + self.nbytes) // PAGESIZE * PAGESIZE
        return (first, last) if first < last else (self.address, self.address)

    @property
    def owns(self) -> bool:
        """Whether the owner is an array that frees the memory itself."""
        return isinstance(self.owner, np.ndarray) and bool(self.owner.flags.owndata)

    @property
    def base(self) -> memoryview | None:
        """The memory where it is an object of Python's, as a ``bytearray``, which then cannot be
        resized."""
        foreign = isinstance(self.owner, np.ndarray) and not self.owns
        return memoryview(self.owner.base) if foreign else None

    def ending(self) -> Any:
        """An object that ends before the memory is freed, for as long as :attr:`base` is there."""
        if not self.owns:
            return self.owner
        if self.owner.base is None:
            _set_base(self.owner, Ending())
        return self.owner.base

    def expect_ordinary(self) -> None:
        """
        Raises:
            InvalidBuffer: neither NumPy nor PyTorch has allocated it, or its pages are not this
                process's alone.
        """
        known = (Ending, NoneType) if self.owns else (bytes, bytearray)
        if isinstance(self.owner, np.ndarray) and not isinstance(_base(self.owner), known):
            raise InvalidBuffer(  # as it may free the memory before the owner is gone
                f"the array's memory belongs to a {type(_base(self.owner)).__name__}; share takes "
                "what NumPy or PyTorch has allocated"
            )
        for region in regions(*self.pages):
            if not region.is_ordinary:
                raise InvalidBuffer(
                    f"the array lies on pages of {region.name or region.access} that are not this "
                    "process's alone, as those of an array that is shared already, in part or by "
                    "another communicator"
                )


def extent(array: Any) -> Extent:
    """The memory of a NumPy array or a torch tensor on the host.

    Raises:
        InvalidBuffer: it is none, or is not contiguous.
    """
    return _of_tensor(array) if _is_tensor(array) else _of_array(array)


def _of_array(array: Any) -> Extent:
    if is_on_device(array):
        raise InvalidBuffer('the array lies on a GPU; use comm.empty(..., memory="cupy")')
    if not isinstance(array, np.ndarray):
        raise InvalidBuffer(f"a {type(array).__name__} is no NumPy array and no tensor of PyTorch")
    if array.dtype.hasobject:
        raise InvalidBuffer("an array of Python objects cannot be shared between processes")
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise InvalidBuffer(f"the array is not contiguous (strides {array.strides})")
    owner: Any = array
    while not owner.flags.owndata and isinstance(base := _base(owner), np.ndarray):
        owner = base
    if _is_tensor(owner.base):
        owner = _of_tensor(owner.base).owner
    return Extent(HOST.address(array), array.nbytes, owner)


def _base(array: Any) -> Any:
    """The object that the array is a view of."""
    return array.base.obj if isinstance(array.base, memoryview) else array.base


def _is_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _of_tensor(tensor: Any) -> Extent:
    """Its owner is the storage, which views of the tensor share, and which can then no more be
    resized: NumPy's views of tensors have PyTorch forbid that."""
    if tensor.device.type != "cpu" or str(tensor.layout) != "torch.strided":
        raise InvalidBuffer(f"a tensor on {tensor.device}, {tensor.layout}, cannot be shared")
    if not tensor.is_contiguous():
        raise InvalidBuffer(f"the tensor is not contiguous (strides {tensor.stride()})")
    if tensor.is_shared():
        raise InvalidBuffer("PyTorch has moved the tensor into shared memory of its own already")
    storage, nbytes = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if nbytes and not tensor.data_ptr():
        raise InvalidBuffer("the tensor's storage was freed")
    tensor.new_empty(0, dtype=sys.modules["torch"].uint8).set_(storage).numpy()
    return Extent(tensor.data_ptr(), nbytes, storage)


def begin(owner: Any) -> int:
    """Where the owner's memory begins now."""
    return HOST.address(owner) if isinstance(owner, np.ndarray) else int(owner.data_ptr())


def _set_base(array: Any, base: object) -> None:
    """Gives ``base`` to an array that has none, by ``PyArray_SetBaseObject``.

    It takes over one reference to the base.
    """
    python = ctypes.PyDLL(None)
    python.PyCapsule_GetPointer.restype = ctypes.POINTER(ctypes.c_void_p)
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address = python.PyCapsule_GetPointer(_ARRAY_API, None)[_SET_BASE_OBJECT]
    python.Py_IncRef(ctypes.py_object(base))
    kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.py_object)
    kind(address)(array, base)  # raises what NumPy does
