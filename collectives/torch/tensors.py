"""The memory of torch's tensors as arrays that collectives read and write."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from collectives.calls.mpi4py_spec import TYPES
from collectives.torch.devices import empty_on_host, is_on_host

#: Types that NumPy has under the same name, whose numbers MPI adds; the others travel as bytes.
NUMPY = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float32", "float64", "complex64", "complex128"),
    )
    if hasattr(torch, name)
}
_BYTE = np.dtype(np.uint8)
#: MPI's types of them.
_TYPES = {dtype: TYPES[numpys.char] for dtype, numpys in NUMPY.items()}
#: Types whose sums, products, minima and maxima are those of MPI.
SUMMABLE = {
    dtype: _TYPES[dtype] for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)
}
#: Bytes of a small tensor.  Above, a call may go through shared memory; below, to meet there costs
#: more than it saves.
SMALL = 64 << 10
_address = MPI.buffer.fromaddress


class _Memory:
    """Memory of a tensor, which it keeps alive, as NumPy asks for it."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, dtype: np.dtype[Any]) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes // dtype.itemsize,),
            "typestr": dtype.str,
            "version": 3,
        }


def items(tensor: torch.Tensor) -> int:
    """Length of the array over a tensor's memory, wherever it lies."""
    return tensor.nbytes // NUMPY.get(tensor.dtype, _BYTE).itemsize


def memory(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Joined array over the memory of a contiguous tensor, which lives as long as the array.

    It is made of the address: ``Tensor.numpy`` would forbid for ever that the storage is resized,
    as FSDP does.
    """
    dtype = NUMPY.get(tensor.dtype, _BYTE)
    if not tensor.numel():
        return np.empty(0, dtype)
    return np.asarray(_Memory(tensor, dtype))


def small(
    tensor: torch.Tensor, types: Mapping[torch.dtype, MPI.Datatype] | None = None
) -> list[Any] | None:
    """Memory and type of a small tensor as MPI takes them; ``None`` if the tensor is no usual one.

    The memory is the tensor's as long as somebody keeps that.  Small calls come often, and to make
    an array takes three times as long.

    Args:
        types: the usual types and MPI's; by default all, which MPI may take as bytes.
    """
    kind = _TYPES.get(tensor.dtype, MPI.BYTE) if types is None else types.get(tensor.dtype)
    if (
        kind is not None
        and is_on_host(tensor)
        and tensor.layout is torch.strided
        and 0 < (nbytes := tensor.nbytes) <= SMALL
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not (types is None and tensor.is_conj())  # only complex numbers can be
    ):
        return [_address(tensor.data_ptr(), nbytes), kind]
    return None


def overlap(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether two contiguous tensors share bytes."""
    begin, other = source.data_ptr(), target.data_ptr()
    return begin < other + target.nbytes and other < begin + source.nbytes


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy of it on the host, for reading."""
    found = tensor.detach().resolve_conj().resolve_neg()
    if is_on_host(tensor):
        return found.contiguous()
    return empty_on_host(found.numel(), found.dtype, pinned=True).view(found.shape).copy_(found)


def apart(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor for reading while another one is written: a copy where they overlap,
    which MPI forbids."""
    source = dense(source)
    return source.clone() if overlap(source, target) else source


def check_dense(tensors: Sequence[torch.Tensor]) -> None:
    """Checks that tensors are ones whose memory a collective can read.

    Raises:
        ValueError: a tensor is sparse, or has no values.
    """
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(
                f"expected dense tensors, got one with the layout {tensor.layout} on "
                f"{tensor.device}; make it dense with tensor.to_dense(), or give it values with "
                "module.to_empty(device=...)"
            )


class Joined:
    """One contiguous tensor, ``whole``, in the place of several.

    It is a view of them where they lie one behind the other, and else a copy, which
    :meth:`write_back` copies into them.  As a context it is ``whole``, and written back at its end.

    Args:
        tensors: one or more, of one dtype.
        reads: whether their values are needed.
    """

    __slots__ = ("is_view", "tensors", "whole")

    def __init__(self, tensors: Sequence[torch.Tensor], reads: bool) -> None:
        self.tensors = tensors
        whole = _view_of_all(tensors)
        self.is_view = whole is not None
        if whole is None:
            items, is_pinned = sum(t.numel() for t in tensors), not is_on_host(tensors[0])
            whole = empty_on_host(items, tensors[0].dtype, pinned=is_pinned)
            if reads:
                self._copy(whole, into_whole=True)
        self.whole = whole

    def __enter__(self) -> torch.Tensor:
        return self.whole

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self.is_view:
            self._copy(self.whole, into_whole=False)

    def write_back(self) -> None:
        if not self.is_view:
            self._copy(self.whole, into_whole=False)

    def _copy(self, whole: torch.Tensor, into_whole: bool) -> None:
        begin = 0
        for tensor in self.tensors:
            tensor = tensor.detach()
            part = whole[begin : begin + tensor.numel()].view(tensor.shape)
            part.copy_(tensor) if into_whole else tensor.copy_(part)
            begin += tensor.numel()


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        is_on_host(tensor)
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _view_of_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A view of tensors that lie one behind the other in one storage; one tensor is itself."""
    first = tensors[0]
    if len(tensors) == 1:
        if not _is_plain(first):
            return None
        # The group's thread may write to a tensor of inference mode if it is detached.
        return first.detach() if first.requires_grad or first.is_inference() else first
    storage, end, items = first.untyped_storage().data_ptr(), first.data_ptr(), 0
    for tensor in tensors:
        if (
            not _is_plain(tensor)
            or tensor.data_ptr() != end
            or tensor.dtype != first.dtype
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
        end += tensor.nbytes
        items += tensor.numel()
    return first.detach().as_strided((items,), (1,))
