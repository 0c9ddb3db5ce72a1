"""The parts of mpi4py's buffer specifications."""

from operator import index
from typing import Any

from mpi4py import MPI

from collectives.errors import InvalidBuffer, InvalidBufferType, UnknownType


def _is_whole(datatype: MPI.Datatype) -> bool:
    """Whether this MPI can use a type that mpi4py has a name for.

    Open MPI 4.1 has nothing behind ``FLOAT16_T``.  MPICH 4.0 knows its size and not its name, and
    ends the process that adds or packs it.
    """
    return bool(datatype.handle) and datatype != MPI.DATATYPE_NULL and bool(datatype.name)


_CONSTANTS = [found for found in vars(MPI).values() if isinstance(found, MPI.Datatype)]
#: Handles of MPI's own types.
PREDEFINED = frozenset(found.handle for found in _CONSTANTS if _is_whole(found))
_LACKING = frozenset(found.handle for found in _CONSTANTS) - PREDEFINED
#: MPI's own types by NumPy's letters and by their names.
TYPES = {name: found for name, found in MPI._typedict.items() if found.handle in PREDEFINED}


def whole_number(value: Any) -> int | None:
    """A whole number of any type, ``None`` for what is none."""
    try:
        return index(value)
    except TypeError:
        return None


def number(value: Any, role: str, what: str) -> int:
    """Raises :class:`InvalidBuffer` for what is no number from 0 on."""
    found = whole_number(value)
    if found is None or found < 0:
        kind = InvalidBufferType if found is None else InvalidBuffer
        raise kind(f"the {role} buffer's {what} is {value!r}, not a number from 0 on")
    return found


def numbers(values: Any, role: str, what: str, blocks: int) -> tuple[int, ...]:
    """One for each block; a single number stands for all.

    Raises:
        InvalidBuffer: for what are no whole numbers, or not as many.
    """
    one = whole_number(values)
    if one is not None:
        return (one,) * blocks
    try:
        found = tuple(index(v) for v in values)
    except TypeError:
        raise InvalidBufferType(f"the {role} buffer's {what} are no whole numbers") from None
    if len(found) != blocks:
        raise InvalidBuffer(
            f"the {role} buffer has {len(found)} {what}, but there are {blocks} ranks"
        )
    return found


def parts(spec: object) -> tuple[object, Any, Any, MPI.Datatype | str | None]:
    """The array, count, displacement and type of a specification."""
    if not isinstance(spec, list | tuple):
        return spec, None, None, None
    match spec:
        case [data]:
            return data, None, None, None
        case [data, MPI.Datatype() | str() as datatype]:
            return data, None, None, datatype
        case [data, [count, displacement]] | [data, (count, displacement)]:
            return data, count, displacement, None
        case [data, count]:
            return data, count, None, None
        case [data, [count, displacement], datatype]:
            return data, count, displacement, datatype
        case [data, count, datatype]:
            return data, count, None, datatype
        case [data, count, displacement, datatype]:
            return data, count, displacement, datatype
    raise InvalidBuffer(f"a buffer specification has 1 to 4 parts, this one has {len(spec)}")


def vector_parts(spec: object) -> tuple[object, Any, Any, MPI.Datatype | str | None]:
    """The array, counts, displacements and type of a v-variant's specification."""
    if not isinstance(spec, list | tuple):
        return spec, None, None, None
    data, *rest = spec or [None] * 5
    datatype = None
    if rest and isinstance(rest[-1], MPI.Datatype | str):
        datatype = rest.pop()
    elif len(rest) > 1 and rest[-1] is None:
        rest.pop()  # the type is to be inferred
    if len(rest) == 1 and isinstance(rest[0], tuple) and len(rest[0]) == 2:
        rest = list(rest[0])  # counts and displacements
    if len(rest) > 2:
        raise InvalidBuffer(f"a buffer specification has 1 to 4 parts, this one has {len(spec)}")
    lengths, starts = [*rest, None, None][:2]
    return data, lengths, starts, datatype


def named_type(datatype: MPI.Datatype | str, role: str) -> MPI.Datatype:
    """Raises :class:`InvalidBuffer` for what is no type of this MPI."""
    if isinstance(datatype, str):
        if datatype not in TYPES:
            raise UnknownType(f"the {role} buffer names the type {datatype!r}, which MPI has not")
        datatype = TYPES[datatype]
    if not isinstance(datatype, MPI.Datatype):
        raise InvalidBufferType(
            f"the {role} buffer's type is a {type(datatype).__name__}; pass an MPI.Datatype"
        )
    if datatype.handle in _LACKING:
        raise InvalidBuffer(f"the {role} buffer names a datatype that this MPI does not have")
    return datatype
