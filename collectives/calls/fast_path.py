"""Calls that ``auto`` leaves to the MPI library before they are parsed.

Parsing a call takes longer than a small collective of the library, so ``auto`` looks at little more
than sizes and types here: in less than a microsecond, mpi4py's own method is called instead.
"""

import sys
from mmap import mmap
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy import ndarray

from collectives.calls.choice import NEVER, ORDINARY, SHARED, Situation, choose
from collectives.calls.mpi4py_spec import CONSTANTS, COUNTABLE, LETTERS, PREDEFINED, TYPES
from collectives.calls.native import library
from collectives.calls.native_plan import Native
from collectives.calls.resources import Resources
from collectives.contracts import contract
from collectives.execution.memory import is_on_device

#: Names of types of numbers that are left to the MPI library: NumPy's types, letters of Python's
#: buffers, PyTorch's names, and the ``id`` of MPI's own types, as asking one takes an MPI call.
Types = frozenset["np.dtype[Any] | str | int"]
#: The calls of a collective that are left to the MPI library: bytes of the largest buffer, which
#: they are below; types of the buffers; what stands for the plan.  Unpacking a named tuple would
#: take longer.
Limit = tuple[int, Types, Native]
LEFT_TO_NATIVE = Native("nothing of ours was measured to be faster; collectives tune measures")
ASKED_FOR = Native("asked for")

#: NumPy's letters of types that are MPI's, too.  A string's are those of its letters, and mpi4py
#: names types of times without taking such a buffer.
_CHARS = frozenset(TYPES) - {"S", "U", "M", "m"}
DTYPES = frozenset(map(np.dtype, _CHARS.intersection(np.typecodes["AllInteger"] + "?efdgFDG")))
_TORCHS = {
    f"torch.{kind}"
    for kind in [
        *("float32", "float64", "complex64", "complex128", "bool"),
        *("uint8", "int8", "int16", "int32", "int64"),
    ]
}
_OWN = {id(constant) for constant in CONSTANTS if constant.handle in PREDEFINED}
ALL: Types = DTYPES | _CHARS | _TORCHS | _OWN
_LETTERS = frozenset(map(id, LETTERS))
#: Buffers of bytes: to ask their length takes a fifth of the time of a view of them.
_BYTES = frozenset((bytes, bytearray, mmap))


def _without(letters: str) -> Types:
    """All types but these, and MPI's types of bytes and letters."""
    dtypes = [*map(np.dtype, letters)]
    names = {name for dtype in dtypes for name in (dtype.char, dtype.str[1:], f"torch.{dtype}")}
    own = [*(TYPES[name] for name in names if name in TYPES), MPI.INTEGER1, MPI.INTEGER2]
    return ALL.difference(dtypes, names, map(id, own), _LETTERS)


#: Small integers are summed by NumPy, whose sums wrap round on every MPI.  MPI rounds a sum of
#: 16-bit numbers with every rank: once on two, as ours is.
_WRAPPED, _ROUNDED = _without("bBhH"), _without("bBhHe")


def nbytes_of(spec: Any, types: Types = ALL) -> int | None:
    """Bytes of the memory in ``array``, ``[array, type]``, ``[array, count, type]`` and the like,
    if it is NumPy's or Python's own and its types are among these; ``None`` for what takes longer
    to read."""
    kind, is_named = type(spec), False
    if kind is list or kind is tuple:
        last = spec[-1] if spec else None
        if id(last) in types:  # this type counts, and not that of the items
            types, is_named = ALL, True
        elif len(spec) < 2 or isinstance(last, MPI.Datatype | str):
            return None  # mpi4py takes no list of an array alone
        spec = spec[0]
        kind = type(spec)
    if kind is ndarray:
        return spec.nbytes if spec.dtype in types else None
    if spec is MPI.IN_PLACE or spec is MPI.BOTTOM:  # mpi4py gives both a buffer of no bytes
        return None
    try:
        if kind in _BYTES:
            return len(spec) if "B" in types else None
        if kind is MPI.buffer and spec.readonly:  # which of the two buffers it is, the reader knows
            return None
        if isinstance(spec, ndarray):  # a subclass, as np.memmap is
            return spec.nbytes if spec.dtype in types else None
        view = memoryview(spec)
    except (TypeError, ValueError, BufferError):  # it is no such buffer, or it was released
        return nbytes_of_tensor(spec, types)
    return view.nbytes if is_named or view.format in types else None


def is_misread(spec: Any, reduces: bool) -> bool:
    """Whether mpi4py may refuse a buffer's items or take them for others: it knows 16-bit numbers
    of torch as bytes, and sums those."""
    items, last = spec, None
    if type(spec) in (list, tuple) and len(spec) > 1:
        items, last = spec[0], spec[-1]
    if isinstance(last, MPI.Datatype) and last.handle not in PREDEFINED:
        return False
    if reduces and id(last) in _LETTERS:
        return True
    if isinstance(items, ndarray):
        return items.dtype not in DTYPES
    return hasattr(items, "__dlpack__") and not is_on_device(items) and nbytes_of(items) is None


def nbytes_of_tensor(tensor: Any, types: Types = ALL) -> int | None:
    """Bytes of a tensor of PyTorch that mpi4py reads, too."""
    torch = sys.modules.get("torch")
    if torch is None or type(tensor) is not torch.Tensor or str(tensor.dtype) not in types:
        return None
    plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad
    plain = plain and not (tensor.is_neg() or tensor.is_conj())
    return int(tensor.nbytes) if plain else None


class Limits(dict[str, Limit]):
    """The limit of each collective.

    It is a dictionary, as an all-reduce of 8 bytes takes less than ten Python calls.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    def __missing__(self, name: str) -> Limit:
        """The limit of a collective; a v-variant's name has a ``v`` behind it, a nonblocking call's
        an ``i`` before it.  ``native`` stands for all calls that name it."""
        named = "native" in (name, self._resources.settings.algorithm)
        found = self[name] = self._of_native() if named else self._of(name)
        return found

    def _of_native(self) -> Limit:
        settings = self._resources.settings
        parsed = settings.parses_native or settings.timeout
        parsed = parsed or self._resources.progress.traffic is not None
        return 0 if parsed else sys.maxsize, ALL - _LETTERS, ASKED_FOR

    def _of(self, name: str) -> Limit:
        resources, settings = self._resources, self._resources.settings
        collective, unequal = name.removesuffix("v").removeprefix("i"), name.endswith("v")
        reduces = contract(collective).reduces
        auto = settings.algorithm == "auto" and not settings.check and not settings.timeout
        auto = auto and not settings.needs_messages and not (settings.reproducible and reduces)
        below = self.of_auto(collective, unequal, name.startswith("i")) if auto else 0
        # Few ranks know how long the others' blocks are: all v-variants are left to MPI, or none.
        if (unequal and below < NEVER) or resources.progress.traffic is not None:
            below = 0
        summed = _WRAPPED if below and resources.comm.size <= 2 else _ROUNDED
        left = LEFT_TO_NATIVE
        if below and resources.facts[0] < resources.comm.size:  # several nodes may not be measured
            why = choose(resources.facts[1], self._call(collective, unequal, name[0] == "i")).reason
            left = Native(why.partition(": ")[2])
        return min(below, COUNTABLE), summed if reduces else ALL, left

    def of_auto(self, collective: str, unequal: bool = False, unordered: bool = False) -> int:
        """The bytes below which ``auto`` takes the MPI library's own.  Collective at first use.

        No array lies in memory that the ranks share before one was asked for.
        """
        memories = ORDINARY if self._resources.node is None or unequal else SHARED
        call = self._call(collective, unequal, unordered)
        return self._resources.facts[1].native_below(call, memories)

    def _call(self, collective: str, unequal: bool, unordered: bool) -> Situation:
        ranks = self._resources.comm.size, self._resources.facts[0]
        return Situation(library(), collective, 0, *ranks, uneven=unequal, unordered=unordered)
