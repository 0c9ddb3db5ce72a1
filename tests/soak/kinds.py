"""Objects with memory, of every kind that a call takes, made so that ids and addresses come again.

A kind is a function that makes a buffer of so many items.  Some keep objects and change them in
place from one call to the next: they grow, move, or get another type or shape.
"""

import array
import ctypes
import mmap
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: Bytes of what is kept and used in parts.
ROOM = 1 << 17
ROWS = 4
_CODES = {"i2": "h", "i4": "i", "i8": "l", "u4": "I", "f4": "f", "f8": "d", "u1": "B", "b1": "B"}
_C_TYPES = {
    "i2": ctypes.c_int16,
    "u4": ctypes.c_uint32,
    "b1": ctypes.c_bool,
    "c8": ctypes.c_float,
    "i4": ctypes.c_int32,
    "i8": ctypes.c_int64,
    "f4": ctypes.c_float,
    "f8": ctypes.c_double,
    "u1": ctypes.c_uint8,
    "c16": ctypes.c_double,
}


class Refused(Exception):
    """Python does not let go of memory that no call uses any more."""


class Sub(np.ndarray):
    """An array of the user's own class."""


@dataclass
class Made:
    """A buffer.

    Attributes:
        kind: its name.
        obj: what is given to the call.
        typed: whether the object itself says of which type its items are.
        base: an object whose memory holds that of ``obj``, and what lies around it.
        offset: byte of ``base`` at which ``obj`` begins.
        kept: what is changed in place for a later call, and must not be while a call uses it.
    """

    kind: str
    obj: Any
    typed: bool
    base: Any = None
    offset: int = 0
    kept: Any = None

    def memory(self) -> np.ndarray:
        """All bytes of ``base``; to be dropped before anything is resized."""
        base = self.obj if self.base is None else self.base
        if isinstance(base, np.ndarray):
            return base.view(np.ndarray).reshape(-1).view(np.uint8)
        return np.frombuffer(base, np.uint8)


@dataclass
class Workshop:
    """Makes buffers, and keeps those that are used again.

    Attributes:
        rank_draws: this rank's own generator, for what the other ranks need not know.
        shared: arrays that all ranks of the node can address, as ``Communicator.empty`` gives them
            or ``share`` moves them.
        in_use: ids of what a call that is under way uses.
    """

    rank_draws: random.Random
    shared: list[np.ndarray] = field(default_factory=list)
    in_use: dict[int, Any] = field(default_factory=dict)
    _kept: dict[str, list[Any]] = field(default_factory=dict)

    def make(self, kind: str, dtype: np.dtype, items: int) -> Made:
        """A buffer of so many items, with anything in it; too large for a part, it is whole."""
        if items * dtype.itemsize > ROOM // 2:
            kind = _WHOLE.get(kind, kind)
        found = KINDS[kind](self, dtype, items)
        found.kind = kind
        return found

    def hold(self, made: Made) -> None:
        """A call uses it from now on."""
        for thing in (made.kept, made.base):
            if thing is not None:
                self.in_use[id(thing)] = thing

    def release(self, made: Made) -> None:
        for thing in (made.kept, made.base):
            self.in_use.pop(id(thing), None)

    def forget(self) -> None:
        """Drops what is kept."""
        self._kept.clear()
        self.shared.clear()
        self.in_use.clear()

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """One of a few objects that later calls get, too, and that no call is using."""
        kept = self._kept.setdefault(name, [])
        if len(kept) < 3:
            kept.append(make())
        free = [thing for thing in kept if id(thing) not in self.in_use]
        return self.rank_draws.choice(free) if free else make()

    def place(self, nbytes: int, room: int, align: int) -> int:
        """Where in memory of ``room`` bytes a part of it begins."""
        most = max(0, room - nbytes) // align
        return align * self.rank_draws.randint(0, min(most, 16))


KINDS: dict[str, Callable[[Workshop, np.dtype, int], Made]] = {}


def _kind(function: Callable[[Workshop, np.dtype, int], Made]) -> Any:
    KINDS[function.__name__.rstrip("_")] = function
    return function


def _part(base: Any, start: int, dtype: np.dtype, items: int) -> np.ndarray:
    """Items of a flat array of bytes."""
    return base[start : start + items * dtype.itemsize].view(dtype)


@_kind
def fresh(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    return Made("", np.empty(items, dtype), True)


@_kind
def two_dimensions(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    rows = next(r for r in (4, 3, 2, 1) if items % r == 0)
    order = shop.rank_draws.choice("CF")
    made = np.empty((rows, items // rows), dtype, order=order)
    return Made("", made, True, base=made.reshape(-1, order="A") if items else None)


@_kind
def slice_of_a_larger_one(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    base = np.empty(items * dtype.itemsize + 256, np.uint8)
    start = dtype.itemsize * shop.rank_draws.randint(0, 4)
    return Made("", _part(base, start, dtype, items), True, base, start)


@_kind
def slice_of_one_that_stays(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    base = shop.keep("slices", lambda: np.zeros(ROOM, np.uint8))
    start = shop.place(items * dtype.itemsize, ROOM, dtype.itemsize)
    return Made("", _part(base, start, dtype, items), True, base, start, base)


@_kind
def misaligned(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    """Its format is not that of the type, so mpi4py wants to be told the type."""
    base = np.empty(items * dtype.itemsize + 64, np.uint8)
    return Made("", _part(base, 1, dtype, items), False, base, 1)


@_kind
def resized(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    """One array for ever, with another length, type and shape in each call."""
    kept = shop.keep("resized", lambda: np.zeros(8, np.uint8))
    kept.shape = (-1,)
    kept.dtype = np.uint8
    try:
        kept.resize(items * dtype.itemsize, refcheck=False)
    except ValueError as error:
        raise Refused(f"ndarray.resize: {error}") from error
    kept.dtype = dtype
    if items and items % 2 == 0 and shop.rank_draws.random() < 0.5:
        kept.shape = (2, -1)
    return Made("", kept, True, kept=kept)


@_kind
def retyped(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    """An array of that many bytes which had another type in the call before."""
    nbytes = items * dtype.itemsize
    kept = shop.keep(f"retyped {nbytes}", lambda: np.zeros(nbytes, np.uint8))
    kept.shape = (-1,)
    kept.dtype = dtype
    return Made("", kept, True, kept=kept)


def _pages() -> np.memmap:
    with tempfile.TemporaryFile() as file:
        file.truncate(ROWS * ROOM)
        return np.memmap(file, np.uint8, "r+", shape=(ROWS, ROOM))


@_kind
def memmap_row(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    pages = shop.keep("memmap", _pages)
    row = pages[shop.rank_draws.randrange(ROWS)]
    return Made("", _part(row, 0, dtype, items), True, row, 0, pages)


@_kind
def mapped_pages(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    pages = shop.keep("pages", lambda: mmap.mmap(-1, ROOM))
    return Made("", memoryview(pages)[: items * dtype.itemsize], dtype == np.uint8, pages, 0, pages)


def _tells(dtype: np.dtype) -> bool:
    """Whether Python's own arrays have a code for the type, and not one for its bytes."""
    return dtype.str[1:] in _CODES and dtype.kind != "b"


@_kind
def array_array(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    code = _CODES.get(dtype.str[1:])
    if code is None:
        return Made("", array.array("d", bytes(items * dtype.itemsize)), False)
    return Made("", array.array(code, bytes(items * dtype.itemsize)), _tells(dtype))


@_kind
def array_array_that_grows(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    code = _CODES.get(dtype.str[1:], "d")
    words = items * dtype.itemsize // np.dtype(code).itemsize
    kept = shop.keep(f"array.array {code}", lambda: array.array(code))
    try:
        while len(kept) < words:
            kept.append(0)
        del kept[words:]
    except BufferError as error:
        raise Refused(f"array.array: {error}") from error
    return Made("", kept, _tells(dtype), kept=kept)


@_kind
def arrays_that_are_swapped(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    """Two arrays of one length change places: the same ids, in other roles."""
    code = _CODES.get(dtype.str[1:], "d")
    words = items * dtype.itemsize // np.dtype(code).itemsize
    kept = shop.keep(f"swapped {code} {words}", lambda: array.array(code, bytes(8 * words))[:words])
    return Made("", kept, _tells(dtype), kept=kept)


@_kind
def bytearray_(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    return Made("", bytearray(items * dtype.itemsize), dtype == np.uint8)


@_kind
def bytearray_that_grows(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    kept = shop.keep("bytearray", bytearray)
    nbytes = items * dtype.itemsize
    try:
        kept.extend(bytes(max(0, nbytes - len(kept))))
        del kept[nbytes:]
    except BufferError as error:
        raise Refused(f"bytearray: {error}") from error
    return Made("", kept, dtype == np.uint8, kept=kept)


@_kind
def memoryview_(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    return Made("", memoryview(np.empty(items, dtype)), dtype.kind != "c")


@_kind
def memoryview_of_bytes(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    return Made("", memoryview(bytearray(items * dtype.itemsize)), dtype == np.uint8)


@_kind
def memoryview_of_a_part(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    base = shop.keep("viewed", lambda: np.zeros(ROOM, np.uint8))
    start = shop.place(items * dtype.itemsize, ROOM, 8)
    view = memoryview(base)[start : start + items * dtype.itemsize]
    return Made("", view, dtype == np.uint8, base, start, base)


@_kind
def ctypes_(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    words = items * (2 if dtype.kind == "c" else 1)
    return Made("", (_C_TYPES[dtype.str[1:]] * words)(), False)


@_kind
def subclass(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    return Made("", np.empty(items, dtype).view(Sub), True)


@_kind
def subclass_view_of_one_that_stays(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    base = shop.keep("subclass", lambda: np.zeros(ROOM, np.uint8))
    start = shop.place(items * dtype.itemsize, ROOM, 16)
    return Made("", _part(base, start, dtype, items).view(Sub), True, base, start, base)


@_kind
def matrix(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    return Made("", np.asmatrix(np.empty((1, items), dtype)), True)


@_kind
def record_array(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    return Made("", np.empty(items, dtype).view(np.recarray), True)


@_kind
def shared(shop: Workshop, dtype: np.dtype, items: int) -> Made:
    """A part of an array that the ranks share; ordinary memory if all are taken."""
    free = [one for one in shop.shared if id(one) not in shop.in_use]
    if not free:
        return fresh(shop, dtype, items)
    base = shop.rank_draws.choice(free)
    start = shop.place(items * dtype.itemsize, base.nbytes, 8)
    return Made("", _part(base, start, dtype, items), True, base, start, base)


#: In the place of those that are parts of something of a fixed size.
_WHOLE = {
    "slice_of_one_that_stays": "slice_of_a_larger_one",
    "memmap_row": "fresh",
    "mapped_pages": "bytearray",
    "memoryview_of_a_part": "memoryview",
    "subclass_view_of_one_that_stays": "subclass",
    "shared": "fresh",
}
