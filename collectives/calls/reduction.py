"""From an MPI operation and a type to the function that reduces two arrays."""

from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.calls.fast_path import LETTERS
from collectives.errors import InvalidBuffer
from collectives.execution.memory import Combine, Items

# Which kinds of number each operation takes (MPI 4.1, section 6.9.2), as NumPy's kind letters.
_NUMBER = "iufcV"  # V: ml_dtypes' bfloat16 and its relatives
_REAL = "iufV"
_INTEGER = "iu"
_LOGICAL = "iub"


def _table() -> list[tuple[MPI.Op, np.ufunc, str]]:
    return [
        (MPI.SUM, np.add, _NUMBER),
        (MPI.PROD, np.multiply, _NUMBER),
        (MPI.MAX, np.maximum, _REAL),
        (MPI.MIN, np.minimum, _REAL),
        (MPI.LAND, np.logical_and, _LOGICAL),
        (MPI.LOR, np.logical_or, _LOGICAL),
        (MPI.LXOR, np.logical_xor, _LOGICAL),
        (MPI.BAND, np.bitwise_and, _INTEGER),
        (MPI.BOR, np.bitwise_or, _INTEGER),
        (MPI.BXOR, np.bitwise_xor, _INTEGER),
    ]


def combiner(op: MPI.Op, dtype: np.dtype[Any], datatype: MPI.Datatype | None) -> Combine:
    """The function ``combine(left, right, out=...)`` of ``op`` on arrays of ``dtype``.

    Built-in operations on numbers are NumPy's ufuncs.  Unlike MPI's comparison, ``MAX`` and ``MIN``
    propagate NaN, which is what makes their result independent of the order.  Operations of the
    user's and the pair types of ``MAXLOC`` go through ``MPI_Reduce_local`` on ``datatype``.

    Raises:
        InvalidBuffer: if MPI does not define ``op`` on this type.
    """
    # Bits are bits, whatever they mean.
    is_number = datatype is None or datatype not in LETTERS
    for known, ufunc, kinds in _table():
        if op == known:
            if dtype.kind not in kinds or dtype.type is np.void:
                raise InvalidBuffer(f"MPI defines no {ufunc.__name__} on {dtype}")
            if not (is_number or kinds is _INTEGER):
                assert datatype is not None, "or it would be one"
                raise InvalidBuffer(
                    f"MPI defines no {ufunc.__name__} on {datatype.name}, as it does not say what "
                    "the bytes mean; name the type of the numbers"
                )
            return ufunc
    if op in (MPI.OP_NULL, MPI.REPLACE, MPI.NO_OP):
        raise InvalidBuffer("this operation is not one that reduces; pass MPI.SUM or another")
    if datatype is None:
        raise InvalidBuffer(f"this operation needs an MPI datatype, and MPI has none for {dtype}")
    return _ReduceLocal(op, datatype)


class _ReduceLocal:
    """An operation that only MPI knows.

    ``MPI_Reduce_local(in, inout)`` overwrites its right operand, so it works on a copy.
    """

    def __init__(self, op: MPI.Op, datatype: MPI.Datatype) -> None:
        self.op = op
        self.datatype = datatype

    def __call__(self, left: Items, right: Items, /, *, out: Items) -> None:
        result = right.copy()
        self.op.Reduce_local(
            [left.view(np.uint8), left.size, self.datatype],
            [result.view(np.uint8), result.size, self.datatype],
        )
        out[...] = result
