"""What can be told of a buffer specification in less than a microsecond."""

import sys
from array import array
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.calls.mpi4py_spec import PREDEFINED, TYPES
from collectives.execution.memory import is_on_device

#: Types of NumPy whose items are MPI's, too; a string's are its letters, and of times mpi4py
#: names a type and takes no buffer.
_CHARS = frozenset(TYPES) - {"S", "U", "M", "m"}
DTYPES = frozenset(map(np.dtype, _CHARS.intersection(np.typecodes["AllInteger"] + "?efdgFDG")))
#: Types whose sums are left to MPI, too: it rounds a sum of 16-bit numbers with every rank.
REDUCED = DTYPES - {np.dtype(np.float16)}
#: Types of MPI's that name bytes and letters, which no arithmetic is defined on: some libraries
#: add them all the same, as the small integers that they are not.
LETTERS = (MPI.BYTE, MPI.PACKED, MPI.CHAR, MPI.WCHAR)
#: MPI's own, by what ``id`` says of them: to ask a type takes an MPI call.
_PREDEFINED = {
    id(constant)
    for constant in vars(MPI).values()
    if isinstance(constant, MPI.Datatype) and constant.handle in PREDEFINED
}
_UNSUMMED = {id(constant) for constant in (*LETTERS, TYPES.get("e"))}
#: Memory of Python's own.
_PYTHONS = (bytearray, bytes, memoryview, array)
#: Types of PyTorch's whose items are MPI's.
_TORCHS = frozenset(
    f"torch.{kind}"
    for kind in [
        *("float32", "float64", "complex64", "complex128", "bool"),
        *("uint8", "int8", "int16", "int32", "int64"),
    ]
)


def nbytes_of(spec: Any, reduces: bool = False) -> int | None:
    """Bytes of the memory in ``array``, ``[array, type]``, ``[array, count, type]`` and the like,
    if it is NumPy's or Python's own and all types are MPI's; ``None`` for what takes longer to
    read.  ``reduces``: and their sums are left to MPI."""
    kind = type(spec)
    dtypes = REDUCED if reduces else DTYPES
    if kind is np.ndarray:
        return spec.nbytes if spec.dtype in dtypes else None
    if kind is list or kind is tuple:
        if len(spec) < 2:  # mpi4py takes no list of an array alone
            return None
        items, last = spec[0], spec[-1]
        if id(last) not in _PREDEFINED and _is_of_program(last):
            return None
        if reduces and id(last) in _UNSUMMED:
            return None
        if type(items) is np.ndarray:
            return items.nbytes if items.dtype in dtypes else None
        return None if type(items) in (list, tuple) else nbytes_of(items, reduces)
    if kind in _PYTHONS:
        try:
            view = memoryview(spec)
        except ValueError:  # it was released; whether that matters, the reader knows
            return None
        return view.nbytes if view.format in _CHARS else None
    return _nbytes_of_tensor(spec)


def is_misread(spec: Any, reduces: bool) -> bool:
    """Whether mpi4py, left alone with a buffer, may refuse its items or take them for others: it
    knows 16-bit numbers of torch as bytes, and sums those."""
    if type(spec) is np.ndarray:
        return spec.dtype not in DTYPES
    items, last = spec, None
    if type(spec) in (list, tuple) and len(spec) > 1:
        items, last = spec[0], spec[-1]
    if isinstance(last, MPI.Datatype) and _is_of_program(last):
        return False
    if reduces and id(last) in _UNSUMMED and last in LETTERS:
        return True
    if isinstance(items, np.ndarray):
        return items.dtype not in DTYPES
    if not hasattr(items, "__dlpack__") or is_on_device(items):
        return False
    return nbytes_of(items) is None


def _is_of_program(last: Any) -> bool:
    """Whether the end of a specification is a type that is not known to be MPI's."""
    if isinstance(last, MPI.Datatype):
        return last.handle not in PREDEFINED
    return isinstance(last, str)


def _nbytes_of_tensor(tensor: Any) -> int | None:
    """Of a tensor of PyTorch's that mpi4py reads, too."""
    torch = sys.modules.get("torch")
    if torch is None or type(tensor) is not torch.Tensor or str(tensor.dtype) not in _TORCHS:
        return None
    plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.requires_grad
    plain = plain and not (tensor.is_neg() or tensor.is_conj())
    return int(tensor.nbytes) if plain else None
