"""torch's reductions as operations of MPI."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from collectives.torch.tensors import NUMPY

_R: Any = ReduceOp.RedOpType
#: Operation on numbers, and on bool: sums are "any" there and products "all", as NCCL has them.
_OPS = {
    int(_R.SUM): (MPI.SUM, MPI.LOR),
    int(_R.AVG): (MPI.SUM, None),
    int(_R.PREMUL_SUM): (MPI.SUM, None),
    int(_R.PRODUCT): (MPI.PROD, MPI.LAND),
    int(_R.MIN): (MPI.MIN, MPI.LAND),
    int(_R.MAX): (MPI.MAX, MPI.LOR),
    int(_R.BAND): (MPI.BAND, MPI.LAND),
    int(_R.BOR): (MPI.BOR, MPI.LOR),
    int(_R.BXOR): (MPI.BXOR, MPI.LXOR),
}
#: Operations that need nothing beside MPI's, by the hash of torch's.
PLAIN_OPS = {
    hash(ReduceOp(kind)): _OPS[int(kind)][0] for kind in (_R.SUM, _R.PRODUCT, _R.MIN, _R.MAX)
}
_BITWISE = {int(_R.BAND), int(_R.BOR), int(_R.BXOR)}
_PREMUL_SUM = int(_R.PREMUL_SUM)
_SUMS = {int(_R.SUM), int(_R.AVG), int(_R.PREMUL_SUM)}
#: Integers to be averaged are complex numbers of two halves, 32 bits each, whose sums are exact.
_HALVES, _LOW = torch.complex128, (1 << 32) - 1


class Reduction(NamedTuple):
    """A reduction of tensors of one dtype.

    Attributes:
        op: operation of MPI.
        wide: dtype in which partial results are kept; ``None``: the tensor's own.
        mean: whether the result is divided by the number of ranks.
        factor: number or tensor by which each rank's part is multiplied first.
    """

    op: MPI.Op
    wide: torch.dtype | None
    mean: bool
    factor: Any = None

    def addend(self, tensor: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        """The part that a rank adds: the tensor, or a copy that is wider or multiplied, in ``room``
        if that is given."""
        part = tensor
        if self.wide is _HALVES:
            whole = tensor.to(torch.int64)
            high = (whole >> 32) & (_LOW if tensor.dtype == torch.uint64 else -1)
            tensor = torch.complex(high.double(), (whole & _LOW).double())
        if self.wide is not None:
            part = tensor.to(self.wide) if room is None else room.copy_(tensor)
        if self.factor is None:
            return part
        out = None if part is tensor else part
        return torch.mul(part, self.factor, out=out).to(part.dtype)

    def finish(self, total: torch.Tensor, result: torch.Tensor, ranks: int) -> None:
        """Brings a sum to the result's memory and dtype; a mean of integers is rounded towards
        zero."""
        result = result.detach()  # it may be of inference mode
        if self.wide is _HALVES:
            high, low = total.real.to(torch.int64), total.imag.to(torch.int64)
            high, low = high + (low >> 32), low & _LOW
            rest = (torch.remainder(high, ranks) << 32) + low
            total = (torch.div(high, ranks, rounding_mode="floor") << 32) + rest // ranks
            total += (high < 0) & (rest % ranks != 0)
        elif self.mean:
            if total.is_complex():  # torch's quotients of these are off by a last bit
                total, result = torch.view_as_real(total), torch.view_as_real(result)
            same = total.dtype == result.dtype
            total = torch.div(total, ranks, out=result if same else total)
        if total.data_ptr() != result.data_ptr():
            result.copy_(total)


def reduction(options: Any, dtype: torch.dtype) -> Reduction:
    """The reduction of tensors of ``dtype`` by torch's options.

    Raises:
        ValueError: the reduction has no meaning for the dtype.
    """
    op = options.reduceOp
    kind = int(op.op)  # a number, as to compare pybind11's enumerations takes 2 us
    found = _reduction(kind, dtype)
    if kind != _PREMUL_SUM:
        return found
    factor = op.__getstate__()[1]
    return found._replace(factor=factor.cpu() if isinstance(factor, torch.Tensor) else factor)


@lru_cache(256)
def _reduction(kind: int, dtype: torch.dtype) -> Reduction:
    name = str(_R(kind))
    if kind not in _OPS:
        raise ValueError(f"there is no reduction {name}")
    numbers = dtype.is_floating_point or dtype.is_complex
    if kind in _BITWISE and numbers:
        raise ValueError(f"Cannot use {name} with non-integral dtype {dtype}")
    if dtype.is_complex and kind not in _SUMS:
        raise ValueError(f"{name} has no meaning for complex numbers")
    if kind == _PREMUL_SUM and not numbers:
        raise ValueError(f"{name} has no meaning for {dtype}, as its factor is a fraction")
    op = _OPS[kind][dtype == torch.bool]
    if op is None:
        raise ValueError(f"Cannot use {name} with bool")
    wide = None
    if dtype.is_floating_point and dtype.itemsize < 4:
        wide = torch.float32
    elif dtype.is_complex and dtype.itemsize < 8:
        wide = torch.complex64
    elif dtype not in NUMPY:  # quantized numbers, whose sum depends on their scale
        raise ValueError(f"{name} has no meaning for {dtype}")
    elif kind == int(_R.AVG) and not numbers:
        wide = _HALVES
    return Reduction(op, wide, kind == int(_R.AVG))
