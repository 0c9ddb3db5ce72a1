"""Samples with several arrays, stored as one NumPy array of records with a field for each array.

The fields of a tuple are ``"0"``, ``"1"``, ...; the fields of a dictionary are its keys.  A single
array stays as it is and has the name ``""``.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Self, TypeVar

import numpy as np

from mpitrain.arrays import Array, Shape

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
    names = array.dtype.names
    return {"": array} if names is None else {name: array[name].copy() for name in names}


def joined(values: Mapping[str, Array]) -> Array:
    """One array of records with a record for each row of the arrays; a single array as it is."""
    if "" in values:
        return values[""]
    kind = np.dtype([(name, array.dtype, array.shape[1:]) for name, array in values.items()])
    found: Array = np.empty(_rows(values.values()), kind)
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
    found = array.view(Partial)
    found.unused = unused
    return found


def unused(array: Array) -> frozenset[str]:
    """The fields that are marked as unused."""
    return array.unused if isinstance(array, Partial) else frozenset()


def marks(array: Array) -> Array:
    """Marks of unused fields for a message: 1 or 0 for each field, type uint8."""
    marked = unused(array)
    return np.array([name in marked for name in array.dtype.names or ("",)], np.uint8)


def marked(array: Array, marks: Array) -> Array:
    """The array with fields marked as unused by the marks of a message."""
    names = array.dtype.names or ("",)
    return partial(array, (name for name, mark in zip(names, marks, strict=True) if mark))


def _rows(arrays: Iterable[Array]) -> int:
    counts = {len(array) for array in arrays}
    if len(counts) != 1:
        raise ValueError(f"arrays of one set of samples have different lengths: {sorted(counts)}")
    return counts.pop()
