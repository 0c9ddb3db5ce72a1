"""Samples with several arrays, stored as one NumPy array of records with a field for each array.

The fields of a tuple are ``"0"``, ``"1"``, ...; the fields of a dictionary are its keys.  A single
array stays as it is and has the name ``""``.  A device has :class:`Records` instead.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from types import ModuleType
from typing import Any, Self, TypeVar, cast

import numpy as np

from mpitrain.arrays import Array, Shape, array_namespace

T = TypeVar("T")


class Fields(tuple[int, ...]):
    """The shape of a sample that is a record: an empty tuple, with the type of the record.

    Attributes:
        dtype: type of the record.
    """

    dtype: np.dtype[Any]

    def __new__(cls, dtype: np.dtype[Any]) -> Self:
        self = super().__new__(cls)
        self.dtype = dtype
        return self

    def __repr__(self) -> str:
        return " and ".join(f"{name} {shape}" for name, shape in shapes(self.dtype).items())


class Records:
    """Records on a device, whose library has none: an array for each field.

    It stands for an array of records: the trainer asks it for no more than its attributes, its
    length and some of its rows.

    Attributes:
        parts: arrays of (samples, ...) by field.
        dtype: type of a record.
        unused: see :class:`Partial`.
    """

    def __init__(self, parts: Mapping[str, Array], unused: Iterable[str] = ()) -> None:
        self.parts = parts
        self.dtype = _record(parts)
        self.unused = frozenset(unused)

    @property
    def xp(self) -> ModuleType:
        """The library of the arrays."""
        return array_namespace(next(iter(self.parts.values())))

    @property
    def shape(self) -> Shape:
        return (len(self),)

    @property
    def size(self) -> int:
        """Number of records."""
        return len(self)

    def __len__(self) -> int:
        return _rows(self.parts.values())

    def __getitem__(self, rows: slice) -> Self:
        return self.each(lambda part: part[rows])

    def each(self, change: Callable[[Array], Array]) -> Self:
        """The records with the results of a function for their arrays."""
        return type(self)({n: change(part) for n, part in self.parts.items()}, self.unused)


def filled(like: Array, rows: int, value: float) -> Array:
    """An array of this many samples like those of another one, with one number everywhere."""

    def of(part: Array) -> Array:
        found: Array = array_namespace(part).full((rows, *part.shape[1:]), value, part.dtype)
        return found

    return cast("Array", like.each(of)) if isinstance(like, Records) else of(like)


def named(values: T | tuple[T, ...] | Mapping[str, T]) -> dict[str, T]:
    """Values by their fields' names, the inverse of :func:`as_given`; ValueError: a key is none."""
    if isinstance(values, tuple):
        return {str(number): value for number, value in enumerate(values)}
    if not isinstance(values, Mapping):
        return {"": values}
    for key in values:
        if not isinstance(key, str) or not key.isidentifier():
            raise ValueError(f"the key {key!r} is not a name of an argument")
    return dict(values)


def as_given(values: Mapping[str, T]) -> T | tuple[T, ...] | dict[str, T]:
    """Values in the form in which the data set gave them: one value, a tuple, or a dictionary."""
    if "" in values:
        return values[""]
    return tuple(values.values()) if "0" in values else dict(values)


def fields(array: Array) -> dict[str, Array]:
    """The arrays of an array of records, copied, by field; an array without fields uncopied."""
    if isinstance(array, Records):
        return dict(array.parts)
    names = array.dtype.names
    return {"": array} if names is None else {name: array[name].copy() for name in names}


def joined(values: Mapping[str, Array]) -> Array:
    """One array of records with a record for each row of the arrays; a single array as it is."""
    if "" in values:
        return values[""]
    if array_namespace(next(iter(values.values()))) is not np:
        return cast("Array", Records(values))
    found: Array = np.empty(_rows(values.values()), _record(values))
    for name, array in values.items():
        found[name] = array
    return found


def shapes(kind: np.dtype[Any]) -> dict[str, Shape]:
    """The shapes of a record's fields, by name."""
    return {name: kind[name].shape for name in kind.names or ()}


def described(array: Array, *, varies: bool = False) -> dict[str, tuple[np.dtype[Any], Any]]:
    """Type and shape of a sample's parts, by field; their numbers of axes if sizes may vary."""
    kind = array.dtype
    found = {"": (kind, array.shape[1:])}
    if kind.names:
        found = {name: (kind[name].base, kind[name].shape) for name in kind.names}
    return {n: (base, len(shape) if varies else shape) for n, (base, shape) in found.items()}


def sizes(kind: np.dtype[Any], shape: Shape) -> list[int]:
    """The sizes along all axes of a sample of this type and shape, field after field."""
    if kind.names is None:
        return list(shape)
    return [size for name in kind.names for size in kind[name].shape]


def resized(kind: np.dtype[Any], shape: Shape, given: Iterable[int]) -> tuple[Any, Shape]:
    """Type and shape of a sample like one of ``kind`` and ``shape``, but of these sizes."""
    rest = iter(given)
    if kind.names is None:
        return kind, tuple(islice(rest, len(shape)))
    own = ((name, kind[name]) for name in kind.names)
    parts = [(name, one.base, tuple(islice(rest, len(one.shape)))) for name, one in own]
    return np.dtype(parts), ()


def zeros(count: int, shape: Shape, kind: Any) -> dict[str, Array]:
    """Arrays of ``count`` samples of zeros, by field; ``kind``: type, unless ``shape`` has one."""
    if isinstance(shape, Fields):
        return fields(np.zeros(count, shape.dtype))
    return fields(np.zeros((count, *shape), kind))


class Partial(np.ndarray[Any, Any]):
    """Gradients with respect to samples of several fields; some fields may be unused by the loss.

    Attributes:
        unused: names of the fields that the loss does not depend on; their gradients are 0.
    """

    unused: frozenset[str] = frozenset()


def partial(array: Array, names: Iterable[str]) -> Array:
    """The array, with these fields marked as unused."""
    if not (unused := frozenset(names)):
        return array
    if isinstance(array, Records):
        return cast("Array", Records(array.parts, unused))
    found = array.view(Partial)
    found.unused = unused
    return found


def unused(array: Array) -> frozenset[str]:
    """The fields that are marked as unused."""
    return array.unused if isinstance(array, Partial | Records) else frozenset()


def marks(array: Array) -> Array:
    """Marks of unused fields for a message: 1 or 0 for each field, type uint8."""
    marked = unused(array)
    return np.array([name in marked for name in array.dtype.names or ("",)], np.uint8)


def marked(array: Array, marks: Array) -> Array:
    """The array with fields marked as unused by the marks of a message."""
    names = array.dtype.names or ("",)
    return partial(array, (name for name, mark in zip(names, marks, strict=True) if mark))


def _record(values: Mapping[str, Array]) -> np.dtype[Any]:
    """The type of a record of these arrays."""
    return np.dtype([(name, array.dtype, array.shape[1:]) for name, array in values.items()])


def _rows(arrays: Iterable[Array]) -> int:
    counts = {len(array) for array in arrays}
    if len(counts) != 1:
        raise ValueError(f"arrays of one set of samples have different lengths: {sorted(counts)}")
    return counts.pop()
