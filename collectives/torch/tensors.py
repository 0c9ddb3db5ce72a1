"""The memory of torch's tensors as arrays that collectives read and write."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from collectives.calls.mpi4py_spec import TYPES
from collectives.torch.devices import empty_on_host, is_on_host

#: Types that NumPy has under the same name, whose numbers MPI adds.
NUMPY = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float32", "float64", "complex64", "complex128"),
    )
}
#: Types of arrays but quantized ones, which have a scale; others travel as integers of their size.
_ARRAYS = {
    dtype: np.dtype(NUMPY.get(dtype, f"u{dtype.itemsize}"))
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and "q" not in str(dtype)
}
#: MPI's types of small tensors that are copied; those of complex numbers may be conjugates.
COPIED = {dtype: TYPES[array.char] for dtype, array in _ARRAYS.items() if not dtype.is_complex}
#: Types whose sums, products, minima and maxima are those of MPI.
SUMMABLE = {
    dtype: COPIED[dtype] for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)
}
#: Bytes of a small tensor.  Above, a call may go through shared memory; below, to meet there costs
#: more than it saves.
SMALL = 64 << 10
#: Looked up once, as each small call asks.
_address, _STRIDED = MPI.buffer.fromaddress, torch.strided


def memory(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Array over the items of a contiguous tensor, which lives as long as the array.

    It is made of the address: ``Tensor.numpy`` would forbid for ever that the storage is resized,
    as FSDP does.
    """
    dtype = _ARRAYS[tensor.dtype]
    if not tensor.numel():
        return np.empty(0, dtype)
    interface = {
        "data": (tensor.data_ptr(), False),
        "shape": (tensor.numel(),),
        "typestr": dtype.str,
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface, tensor=tensor))


def small(tensors: Any, types: Mapping[torch.dtype, MPI.Datatype] = COPIED) -> list[Any] | None:
    """Memory and type of the one small tensor of a list as MPI takes them; ``None`` if it is no
    such list, or no usual tensor.

    The memory is the tensor's as long as somebody keeps that.  Small calls come often, and to make
    an array takes three times as long.

    Args:
        types: the usual types and MPI's.
    """
    if type(tensors) is list and len(tensors) == 1:
        kind = types.get((tensor := tensors[0]).dtype)
        if kind is not None and _is_usual(tensor) and 0 < (nbytes := tensor.nbytes) <= SMALL:
            try:
                return [_address(tensor.data_ptr(), nbytes), kind]
            except (RuntimeError, ValueError):  # it has no memory of its own
                return None
    return None


def small_pair(
    source: torch.Tensor,
    output: torch.Tensor,
    blocks: tuple[int, int],
    types: Mapping[torch.dtype, MPI.Datatype] = COPIED,
) -> tuple[list[Any], list[Any]] | None:
    """As :func:`small` of two tensors of a dtype that do not overlap; ``None`` if they do not fit.

    Args:
        blocks: numbers of blocks of one size in the two tensors.
    """
    kind = types.get(dtype := source.dtype)
    if (
        kind is not None
        and output.dtype is dtype
        and _is_usual(source)
        and _is_usual(output)
        and 0 < (sent := source.nbytes) <= SMALL >= (got := output.nbytes)
        and sent * blocks[1] == got * blocks[0]
    ):
        try:
            begin, other = source.data_ptr(), output.data_ptr()
            if begin >= other + got or other >= begin + sent:
                return [_address(begin, sent), kind], [_address(other, got), kind]
        except (RuntimeError, ValueError):  # one has no memory of its own
            return None
    return None


def _is_usual(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory on the host has its values, or their conjugates."""
    return (
        is_on_host(tensor)
        and tensor.layout is _STRIDED
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not is_fake(tensor)
    )


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of ``FakeTensorMode``, which has a device and no values."""
    is_own = type(tensor) is not torch.Tensor and tensor.layout is _STRIDED
    return is_own and tensor.untyped_storage().device.type == "meta"


def apart(sources: Sequence[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """The values of tensors, one behind the other, while a contiguous one is written: a copy where
    they overlap, which MPI forbids."""
    whole = Joined(sources, reads=True).whole
    begin, other = whole.data_ptr(), target.data_ptr()
    overlap = begin < other + target.nbytes and other < begin + whole.nbytes
    return whole.clone() if overlap else whole


def check_dense(tensors: Sequence[torch.Tensor]) -> None:
    """Checks that tensors are ones whose memory a collective can read, and waits for their values.

    Raises:
        ValueError: a tensor is sparse or quantized, or has no values or no memory of its own.
    """
    for tensor in tensors:
        is_plain = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)
        if not is_plain or bare(tensor) is None:
            raise ValueError(
                "expected dense tensors of numbers in memory of their own, got a "
                f"{type(tensor).__name__} of {tensor.dtype} with the layout {tensor.layout} on "
                f"{tensor.device}; make it dense with tensor.to_dense() or tensor.dequantize(), "
                "give it values with module.to_empty(device=...), take its part of this rank with "
                "DTensor.to_local(), or leave torch.func's transform"
            )


def bare(tensor: torch.Tensor) -> Any:
    """The tensor, a fake one as well, or the result of a functional collective that it stands for,
    once it has come; ``None`` if there is no memory."""
    with suppress(RuntimeError):  # torch.func has wrapped it
        if not tensor.numel() or is_fake(tensor) or tensor.data_ptr():
            return tensor
    result = getattr(tensor, "trigger_wait", None)
    return result and bare(result())


def check_parts(
    what: str, parts: Sequence[torch.Tensor], one: torch.Tensor, ranks: int, of: int | None = None
) -> None:
    """Checks that a list has a tensor for each rank, and that they, or the one ``of`` a rank, have
    as many items as this rank's own tensor, and its dtype.

    Raises:
        ValueError: they do not.
    """
    check_dense([*parts, one])
    if len(parts) != ranks or {part.dtype for part in parts} != {one.dtype}:
        raise ValueError(
            f"{what} takes {ranks} tensors of {one.dtype}, one a rank, got {len(parts)} of "
            f"{', '.join(sorted({str(part.dtype) for part in parts}))}"
        )
    found = [part.numel() for part in (parts if of is None else parts[of : of + 1])]
    if set(found) != {one.numel()}:
        raise ValueError(
            f"{what} of {one.numel()} items of this rank does not fit tensors of {found} items"
        )


def check_whole(what: str, whole: torch.Tensor, part: torch.Tensor, ranks: int) -> None:
    """Checks that a tensor has as many items as all ranks' parts of it, and their dtype.

    Raises:
        ValueError: it does not.
    """
    check_dense([whole, part])
    if whole.numel() != ranks * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{what}: the larger tensor's size must be equal to world_size times the smaller's, "
            f"got {whole.numel()} items of {whole.dtype} and {part.numel()} of {part.dtype} on "
            f"{ranks} ranks"
        )


class Joined:
    """One contiguous tensor of one axis, ``whole``, in the place of several.

    It is a view of them where they lie one behind the other, and else a copy on the host, which
    :meth:`write_back` copies into them.  As a context it is ``whole``, and written back at its end.

    Args:
        tensors: one or more, of one dtype.
        reads: whether their values are needed.
    """

    __slots__ = ("is_view", "tensors", "whole")

    def __init__(self, tensors: Sequence[torch.Tensor], reads: bool) -> None:
        self.tensors = tensors = [bare(tensor) for tensor in tensors]
        whole = _view_of_all(tensors)
        self.is_view = whole is not None
        if whole is None:
            items, is_pinned = sum(t.numel() for t in tensors), not all(map(is_on_host, tensors))
            whole = empty_on_host(items, tensors[0].dtype, pinned=is_pinned)
        self.whole = whole
        if reads and not self.is_view:
            for tensor, part in self._parts():
                part.copy_(tensor)

    def __enter__(self) -> torch.Tensor:
        return self.whole

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.write_back()

    def write_back(self) -> None:
        if not self.is_view:
            for tensor, part in self._parts():
                tensor.copy_(part)

    def _parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor, and its part of the copy."""
        parts = self.whole.split([tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            yield tensor.detach(), part.view(tensor.shape)


def _view_of_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A view of tensors that lie one behind the other in one storage."""
    first = tensors[0]
    storage, end, items = first.untyped_storage().data_ptr(), first.data_ptr(), 0
    for tensor in tensors:
        if (
            not _is_usual(tensor)
            or tensor.is_conj()
            or tensor.data_ptr() != end
            or tensor.dtype != first.dtype
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
        end += tensor.nbytes
        items += tensor.numel()
    # The group's thread may write to a tensor of inference mode if it is detached.
    return first.as_strided((items,), (1,)).detach()
