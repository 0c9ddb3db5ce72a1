"""An ordinary array in the ranks' shared memory, under the address that it has.

The whole pages of the array are replaced by shared ones (Linux's ``mremap``), so every name, view
and pointer of it stays right.  The bytes before its first and after its last whole page lie on
pages with other data: they stay private, and the peers use a copy, which a collective refreshes
before and brings back after (:class:`~collectives.execution.transport.windows.Edge`).

Whoever allocated the memory goes on to own it.  When the owner is about to free it, or the
communicator is closed, private pages with the same contents take the place of the shared ones.
"""

import os
import sys
import threading
import weakref
from mmap import PAGESIZE
from typing import Any, NamedTuple

import numpy as np

from collectives.errors import InvalidBuffer
from collectives.execution.memory import HOST, is_on_device
from collectives.execution.transport import Bytes
from collectives.execution.transport.pages import (
    bytes_at,
    discard,
    make_private,
    put,
    regions,
)
from collectives.execution.transport.windows import Edge, Window


class Extent(NamedTuple):
    """Memory of an array: where it is, and the object that ends when it is freed."""

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

    def expect_ordinary(self) -> None:
        """
        Raises:
            InvalidBuffer: neither NumPy nor PyTorch has allocated it, or its pages are not this
                process's alone.
        """
        is_numpys = isinstance(self.owner, np.ndarray) and self.owner.flags.owndata
        if not (is_numpys or hasattr(self.owner, "data_ptr")):
            raise InvalidBuffer(
                f"the array's memory belongs to a {type(self.owner).__name__}; share takes what "
                "NumPy or PyTorch has allocated"
            )
        for region in regions(*self.pages):
            if not region.is_ordinary:
                raise InvalidBuffer(
                    f"the array lies on pages of {region.name or region.access} that are not this "
                    "process's alone, as those of an array that another communicator shares"
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
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if _is_tensor(owner):
        owner = _of_tensor(owner).owner
    return Extent(HOST.address(array), array.nbytes, owner)


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
    storage = tensor.untyped_storage()
    tensor.new_empty(0, dtype=sys.modules["torch"].uint8).set_(storage).numpy()
    return Extent(tensor.data_ptr(), tensor.numel() * tensor.element_size(), storage)


def _begin(owner: Any) -> int:
    """Where the owner's memory begins now."""
    return HOST.address(owner) if isinstance(owner, np.ndarray) else int(owner.data_ptr())


class Adopted(Window):
    """The ranks' arrays of one call of ``Communicator.share``.

    Args:
        segments: the ranks' memory; each begins as far from the start of a page as its array.
        own: the array.
    """

    def __init__(self, segments: list[Bytes], rank: int, own: Extent) -> None:
        super().__init__(segments, rank, HOST)
        self._own = segments[rank]
        self.address = own.address
        self._owner = weakref.ref(own.owner)
        self._begin = _begin(own.owner)
        self._first, self._last = own.pages
        #: Of the own segment.
        self._shared = HOST.address(segments[rank])
        self._file = 0

    def adopt(self) -> None:
        """Moves the array into its segment.

        Raises:
            OSError: it cannot be; nothing has changed.
        """
        nbytes = self._last - self._first
        source = self._shared + self._first - self.address
        if self.nbytes:
            self._own[...] = bytes_at(self.address, self.nbytes, keeps=None)
        if nbytes:
            put(source, nbytes, self._first)
            (found, *_) = regions(source, source + 1)
            self._file = found.file
            _LIVE.add(self)

    @property
    def is_there(self) -> bool:
        """Whether the array's memory is still its owner's, where it was."""
        owner = self._owner()
        return owner is not None and _begin(owner) == self._begin

    def segment(self, rank: int) -> Bytes:
        """The memory of ``rank``; the own keeps the array alive."""
        if rank in self.others:
            return self.others[rank]
        return bytes_at(self._shared, self.nbytes, keeps=(self._own, self._owner()))

    def edges(self, offset: int, nbytes: int) -> list[Edge]:
        found, owner, segment = [], self._owner(), self.segment(self.rank)
        head, tail = self._first - self.address, self._last - self.address
        for start, stop in ((0, head), (tail, self.nbytes)):
            start, stop = max(start, offset), min(stop, offset + nbytes)
            if start < stop:
                outside = bytes_at(self.address + start, stop - start, keeps=owner)
                found.append(Edge(outside, segment[start:stop]))
        return found

    def restore(self) -> None:
        """Private pages in the place of the shared ones, where they are still there.

        Raises:
            OSError: there is no memory for them; those that are not replaced stay shared.
        """
        for region in regions(self._first, self._last):
            if self._file and region.file == self._file:
                make_private(region.start, region.stop - region.start)
        _LIVE.discard(self)

    def end(self) -> None:
        try:
            self.restore()
        except OSError:  # they stay shared, which is harmless: nobody reads them any more
            return
        start = self._shared // PAGESIZE * PAGESIZE
        discard(start, self._shared + self.nbytes - start)


#: The arrays of this process: what a child process sees is the same for all communicators.
_LIVE: "weakref.WeakSet[Adopted]" = weakref.WeakSet()
_PIPES = threading.local()


def _before_fork() -> None:
    _PIPES.ends = os.pipe() if _LIVE else None


def _in_parent() -> None:
    """Waits until the child has its own pages: until then it must see no change."""
    if _PIPES.ends is not None:
        reading, writing = _PIPES.ends
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)


def _in_child() -> None:
    """The child's arrays are its own, as after any fork."""
    if _PIPES.ends is None:
        return
    reading, writing = _PIPES.ends
    try:
        for window in list(_LIVE):
            window.restore()
    except OSError as error:
        os.write(2, f"collectives: no memory for a child's arrays: {error}\n".encode())
        os._exit(1)
    os.write(writing, b".")
    os.close(reading)
    os.close(writing)


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
