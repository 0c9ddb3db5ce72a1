"""An ordinary array in the ranks' shared memory, under the address that it has.

The whole pages of the array are replaced by shared ones (``mmap`` at their address), so every name,
view and pointer of it stays right.  The bytes before its first and after its last whole page lie on
pages with other data: they stay private, and the peers use a copy, which a collective refreshes
before and brings back after (:class:`~collectives.execution.transport.windows.Edge`).

Whoever allocated the memory goes on to own it.  When the owner is about to free it, or the
communicator is closed, private pages with the same contents take the place of the shared ones.
"""

import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from mmap import PAGESIZE
from typing import Any, NamedTuple

import numpy as np

from collectives.errors import InvalidBuffer
from collectives.execution.memory import HOST, is_on_device
from collectives.execution.plan import Plan
from collectives.execution.transport import Bytes
from collectives.execution.transport.pages import bytes_at, discard, make_private, put, regions
from collectives.execution.transport.windows import Edge, Window

log = logging.getLogger("collectives")


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
        base = self.owner
        if isinstance(base, np.ndarray) and not base.flags.owndata:
            base = base.base.obj if isinstance(base.base, memoryview) else base.base
        if isinstance(base, np.ndarray | bytes | bytearray) or hasattr(base, "data_ptr"):
            pass  # none of these frees its memory before the owner is gone
        else:
            raise InvalidBuffer(
                f"the array's memory belongs to a {type(base).__name__}; share takes what NumPy or "
                "PyTorch has allocated"
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
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if _is_tensor(owner.base):
        owner = _of_tensor(owner.base).owner
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
    storage, nbytes = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if nbytes and not tensor.data_ptr():
        raise InvalidBuffer("the tensor's storage was freed")
    tensor.new_empty(0, dtype=sys.modules["torch"].uint8).set_(storage).numpy()
    return Extent(tensor.data_ptr(), nbytes, storage)


def _begin(owner: Any) -> int:
    """Where the owner's memory begins now."""
    return HOST.address(owner) if isinstance(owner, np.ndarray) else int(owner.data_ptr())


class Adopted(Window):
    """The ranks' arrays of one call of ``Communicator.share``.

    Args:
        segments: the ranks' memory; each begins as far from the start of a page as its array.
        own: the array.

    Attributes:
        first, last: address of the first whole page, and the one behind the last.
        file: the kernel's number of the file that these are mapped from; 0 for none.
    """

    has_edges = True

    def __init__(self, segments: list[Bytes], rank: int, own: Extent) -> None:
        super().__init__(segments, rank, HOST)
        self._own = segments[rank]
        self.address = own.address
        self._owner = weakref.ref(own.owner)
        self._begin = _begin(own.owner)
        self.first, self.last = own.pages
        #: Address of the own segment.
        self._shared = HOST.address(segments[rank])
        self.file = 0
        self._plans: weakref.WeakSet[Plan] = weakref.WeakSet()

    def adopt(self, descriptor: int, begin: int) -> None:
        """Moves the array into its segment, which begins at byte ``begin`` of a file.

        Raises:
            OSError: it cannot be; nothing has changed.
        """
        nbytes = self.last - self.first
        source = self._shared + self.first - self.address
        if self.nbytes:
            self._own[...] = bytes_at(self.address, self.nbytes, keeps=None)
        if nbytes:
            (found,) = regions(source, source + 1)
            self.file = found.file
            _LIVE.add(self)
            put(descriptor, begin + source - self._shared, nbytes, self.first)

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
        head, tail = self.first - self.address, self.last - self.address
        for start, stop in ((0, head), (tail, self.nbytes)):
            start, stop = max(start, offset), min(stop, offset + nbytes)
            if start < stop:
                outside = bytes_at(self.address + start, stop - start, keeps=owner)
                found.append(Edge(outside, segment[start:stop]))
        return found

    def used_by(self, plan: Plan) -> None:
        self._plans.add(plan)

    def end(self) -> None:
        """Private pages take the place of the shared ones; plans that used these are freed."""
        for plan in [*self._plans]:
            (plan.abandon if plan.is_underway else plan.Free)()
        try:
            for first, last in restore([self]):  # never are there two copies of the whole array
                discard(self._shared + first - self.address, last - first)
        except OSError as error:
            log.warning("an array stays on shared pages: %s", error)
            _KEPT.append(self)  # so that a child process gets its own
            return
        start = self._shared // PAGESIZE * PAGESIZE
        discard(start, self._shared + self.nbytes - start)


def restore(windows: Iterable[Adopted]) -> Iterator[tuple[int, int]]:
    """Private pages with the same contents in the place of the shared ones, where these are still
    there, piece by piece; the bounds of each piece that is done.

    Raises:
        OSError: there is no memory for them; those that are not replaced stay shared.
    """
    pages = {window.file: window for window in windows if window.file}
    if not pages:
        return
    least = min(window.first for window in pages.values())
    most = max(window.last for window in pages.values())
    for region in [*regions(least, most)]:
        if (window := pages.get(region.file)) is not None:
            start, stop = max(region.start, window.first), min(region.stop, window.last)
            if start < stop:
                yield from make_private(start, stop)
    for window in pages.values():
        _LIVE.discard(window)


#: The arrays of this process: what a child process sees is the same for all communicators.
_LIVE: "weakref.WeakSet[Adopted]" = weakref.WeakSet()
#: Arrays that could not be given private pages.
_KEPT: list[Adopted] = []


class _Forks(threading.local):
    """For each fork that this thread is in, the pipe by which the child says that it is ready; a
    signal's handler may fork while another fork is under way."""

    def __init__(self) -> None:
        self.pipes: list[tuple[int, int] | None] = []


_FORKS = _Forks()


def _before_fork() -> None:
    _FORKS.pipes.append(None)
    if _LIVE:
        with suppress(OSError):  # without one the child has its own pages, if a little later
            _FORKS.pipes[-1] = os.pipe()


def _in_parent() -> None:
    """Waits until the child has its own pages: until then it must see no change."""
    if (pipe := _FORKS.pipes.pop()) is not None:
        reading, writing = pipe
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)


def _in_child() -> None:
    """The child's arrays are its own, as after any fork."""
    pipe = _FORKS.pipes.pop()
    try:
        if pipe is not None:
            os.close(pipe[0])
        for _ in restore([*_LIVE]):
            pass
        if pipe is not None:
            os.write(pipe[1], b".")
            os.close(pipe[1])
    except BaseException as error:
        os.write(2, f"collectives: a child cannot have its own arrays: {error!r}\n".encode())
        os._exit(1)


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
