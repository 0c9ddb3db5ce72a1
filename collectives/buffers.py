"""mpi4py's buffer specifications, read into flat NumPy arrays."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI
from mpi4py.util import dtlib

from collectives.errors import InvalidBuffer
from collectives.memory import HOST, CudaMemory, Memory, is_on_device


@dataclass(frozen=True)
class Buffer:
    """Memory as MPI sees it: ``items.size`` items of one type.

    Attributes:
        items: contiguous 1-D view of the caller's memory, never a copy; NumPy's or CuPy's.
        datatype: the MPI type that the caller named; ``None`` if it follows from ``items.dtype``.
        counts: lengths of the blocks of a v-variant; ``None`` if all are equal.
        displacements: where these blocks begin; ``None`` if they lie one behind the other.
    """

    items: npt.NDArray[Any]
    datatype: MPI.Datatype | None
    counts: tuple[int, ...] | None = None
    displacements: tuple[int, ...] | None = None

    @property
    def address(self) -> int:
        return self.memory.address(self.items)

    @cached_property
    def memory(self) -> Memory:
        """Where it lies."""
        return CudaMemory() if is_on_device(self.items) else HOST

    def mpi_datatype(self) -> MPI.Datatype | None:
        """The MPI type, or ``None`` where this MPI has none (float16, bfloat16 on some)."""
        if self.datatype is not None:
            return self.datatype
        return MPI._typedict.get(self.items.dtype.char) or None

    def blocks(self) -> list[npt.NDArray[Any]]:
        """Views of the blocks, where there are gaps between them."""
        pairs = zip(self.displacements or (), self.counts or ())
        return [self.items[start : start + count] for start, count in pairs]

    def view(self, borrow: bool) -> npt.NDArray[Any]:
        """``items``, or the same memory without keeping it alive."""
        return self.memory.borrowed(self.items) if borrow else self.items


def vector_buffer(spec: object, role: str, blocks: int) -> Buffer:
    """Reads ``[array, counts]``, ``[array, (counts, displacements)]``, with a type behind, or
    ``[array, counts, displacements, type]``, as mpi4py's v-variants take them.

    Counts and displacements are in items; a number stands for as many equal ones.  Left out, the
    blocks are equal and one behind the other.

    Raises:
        InvalidBuffer: as :func:`read_buffer`, and for lists that are not ``blocks`` long.
    """
    data, lengths, starts, datatype = _vector_parts(spec)
    whole = read_buffer(data if datatype is None else [data, datatype], role)
    if lengths is None:
        lengths, rest = divmod(whole.items.size, blocks)
        if rest:
            raise InvalidBuffer(
                f"the {role} buffer of {whole.items.size} items is not a multiple of {blocks} "
                "blocks; name their counts"
            )
    counts = _whole_numbers(lengths, role, "counts", blocks)
    if starts is None:
        displacements = tuple(accumulate(counts[:-1], initial=0))
    elif isinstance(starts, int):
        displacements = tuple(starts * j for j in range(blocks))
    else:
        displacements = _whole_numbers(starts, role, "displacements", blocks)
    for j, (start, count) in enumerate(zip(displacements, counts)):
        if count < 0 or (count and not 0 <= start <= whole.items.size - count):
            raise InvalidBuffer(
                f"the {role} buffer holds {whole.items.size} items, but block {j} is {count} items "
                f"from item {start} on"
            )
    first = displacements[0] if counts[0] else 0
    packed = tuple(accumulate(counts[:-1], initial=first))
    if all(d == p for d, p, n in zip(displacements, packed, counts) if n):
        return replace(whole, items=whole.items[first : first + sum(counts)], counts=counts)
    return replace(whole, counts=counts, displacements=displacements)


def _whole_numbers(values: Any, role: str, what: str, blocks: int) -> tuple[int, ...]:
    if isinstance(values, int | np.integer):
        return (int(values),) * blocks
    numbers = tuple(int(v) for v in values)
    if len(numbers) != blocks:
        raise InvalidBuffer(
            f"the {role} buffer has {len(numbers)} {what}, but there are {blocks} ranks"
        )
    return numbers


def _vector_parts(spec: object) -> tuple[object, Any, Any, MPI.Datatype | str | None]:
    if not isinstance(spec, list | tuple):
        return spec, None, None, None
    data, *rest = spec
    datatype = rest.pop() if rest and isinstance(rest[-1], MPI.Datatype | str) else None
    if len(rest) == 1 and isinstance(rest[0], tuple) and len(rest[0]) == 2:
        rest = list(rest[0])  # counts and displacements
    if len(rest) > 2:
        raise InvalidBuffer(f"a buffer specification has 1 to 4 parts, this one has {len(spec)}")
    lengths, starts = [*rest, None, None][:2]
    return data, lengths, starts, datatype


def read_buffer(spec: object, role: str, blocks: int = 1) -> Buffer:
    """Reads ``array``, ``[array, type]``, ``[array, count]``, ``[array, count, type]``,
    ``[array, (count, displ), type]`` or ``[array, count, displ, type]``.

    Args:
        role: ``"send"`` or ``"receive"``, for messages; a receive buffer must be writable.
        blocks: blocks that the collective puts into this buffer; as in mpi4py, a given count is
            that of one block, and displacements are in items.

    Raises:
        InvalidBuffer: for memory that is not contiguous, not writable, too short, or on a device,
            and for types with gaps.
    """
    data, count, displacement, datatype = _parts(spec)
    array = _device_array(data, role) if is_on_device(data) else _array(data, role)
    if isinstance(datatype, str):
        datatype = MPI._typedict.get(datatype, MPI.DATATYPE_NULL)
    items = array if datatype is None else _as_type(array, datatype, role)
    if displacement:
        items = items[displacement:]
    if count is not None:
        if count < 0 or count * blocks > items.size:
            raise InvalidBuffer(
                f"the {role} buffer holds {items.size} items, but {count * blocks} were asked for"
            )
        items = items[: count * blocks]
    if role == "receive" and not getattr(items.flags, "writeable", True):
        raise InvalidBuffer("the receive buffer is read-only; pass a writable array")
    return Buffer(items, datatype)


def _parts(spec: object) -> tuple[object, int | None, int, MPI.Datatype | str | None]:
    if not isinstance(spec, list | tuple):
        return spec, None, 0, None
    match spec:
        case [data]:
            return data, None, 0, None
        case [data, MPI.Datatype() | str() as datatype]:
            return data, None, 0, datatype
        case [data, [count, displacement]] | [data, (count, displacement)]:
            return data, count, displacement or 0, None
        case [data, count]:
            return data, count, 0, None
        case [data, [count, displacement], datatype]:
            return data, count, displacement or 0, datatype
        case [data, count, datatype]:
            return data, count, 0, datatype
        case [data, count, displacement, datatype]:
            return data, count, displacement or 0, datatype
    raise InvalidBuffer(f"a buffer specification has 1 to 4 parts, this one has {len(spec)}")


def _array(data: object, role: str) -> npt.NDArray[Any]:
    if isinstance(data, np.ndarray):
        array = data
    else:
        try:
            array = np.asarray(memoryview(data))  # type: ignore[arg-type]
        except TypeError:
            raise InvalidBuffer(
                f"the {role} buffer is a {type(data).__name__}; pass an array or another object "
                "with the buffer protocol"
            ) from None
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise InvalidBuffer(
            f"the {role} buffer is not contiguous (shape {array.shape}, strides {array.strides}); "
            "pass np.ascontiguousarray(array)"
        )
    if array.dtype.hasobject:
        raise InvalidBuffer(f"the {role} buffer holds Python objects; use the lower-case method")
    return array.reshape(-1, order="A")


def _device_array(data: Any, role: str) -> npt.NDArray[Any]:
    """CuPy's view of device memory, whoever allocated it."""
    try:
        import cupy
    except ImportError:
        raise InvalidBuffer(
            f"the {role} buffer lies on a GPU, which needs CuPy: pip install 'mpitrain[cuda13]' "
            "(or cuda12), or copy it to the host first"
        ) from None
    array = cupy.asarray(data)
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise InvalidBuffer(
            f"the {role} buffer is not contiguous (shape {array.shape}, strides {array.strides}); "
            "pass cupy.ascontiguousarray(array)"
        )
    return array.reshape(-1, order="A")


def _as_type(array: npt.NDArray[Any], datatype: MPI.Datatype, role: str) -> npt.NDArray[Any]:
    if datatype == MPI.DATATYPE_NULL:
        raise InvalidBuffer(f"the {role} buffer names a datatype that this MPI does not have")
    lower, extent = datatype.Get_extent()
    if lower != 0 or extent != datatype.Get_size():
        raise InvalidBuffer(
            f"the {role} buffer's datatype has gaps (extent {extent}, size {datatype.Get_size()} "
            "bytes); pack it first, or call with algorithm='native'"
        )
    dtype = np.dtype(dtlib.to_numpy_dtype(datatype))
    if dtype.subdtype or dtype.names:  # a type of several numbers: only its operation knows them
        dtype = np.dtype((np.void, extent))
    if array.nbytes % dtype.itemsize:
        raise InvalidBuffer(
            f"the {role} buffer of {array.nbytes} bytes is no whole number of {dtype} items"
        )
    return array.view(dtype)
