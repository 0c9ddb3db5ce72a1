"""Several arrays of each sample in one array of records, whose fields they are.

A tuple of a data set has fields ``"0"``, ``"1"``, ...; a dictionary has its keys.  An array that is
alone stays as it is, under the name ``""``.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Self, TypeVar

import numpy as np

from mpitrain.arrays import Array, Shape

T = TypeVar("T")


class Fields(tuple[int, ...]):
    """The shape of a sample that is a record: without axes, and the type says the rest.

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
    """The values by the names of their fields.

    Raises:
        ValueError: a key of a dictionary cannot be a field's name.
    """
    if isinstance(values, tuple):
        return {str(number): value for number, value in enumerate(values)}
    if not isinstance(values, Mapping):
        return {"": values}
    for key in values:
        if not isinstance(key, str) or not key.isidentifier():
            raise ValueError(f"the key {key!r} is no name of an argument")
    return dict(values)


def as_given(values: Mapping[str, T]) -> T | tuple[T, ...] | dict[str, T]:
    """The values in their first form: one, a tuple, or a dictionary."""
    if "" in values:
        return values[""]
    return tuple(values.values()) if "0" in values else dict(values)


def fields(array: Array) -> dict[str, Array]:
    """Copies of the arrays in one of records; one that has no fields, as it is."""
    names = array.dtype.names
    return {"": array} if names is None else {name: array[name].copy() for name in names}


def joined(values: Mapping[str, Array]) -> Array:
    """One array with a record for each row of the arrays, or the array that is alone."""
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


def zeros(count: int, shape: Shape, kind: Any) -> dict[str, Array]:
    """``count`` samples of zeros; ``kind`` is the type where ``shape`` does not say it."""
    if isinstance(shape, Fields):
        return fields(np.zeros(count, shape.dtype))
    return fields(np.zeros((count, *shape), kind))


class Partial(np.ndarray[Any, Any]):
    """Gradients by the parts of samples; those that the loss does not depend on are 0.

    Attributes:
        unused: names of the parts that do not matter.
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
    """The fields that are marked so."""
    return array.unused if isinstance(array, Partial) else frozenset()


def marks(array: Array) -> Array:
    """A mark for each field, 1 or 0, of type uint8, for a message."""
    marked = unused(array)
    return np.array([name in marked for name in array.dtype.names or ("",)], np.uint8)


def marked(array: Array, marks: Array) -> Array:
    """The array with the marks of a message."""
    names = array.dtype.names or ("",)
    return partial(array, (name for name, mark in zip(names, marks, strict=True) if mark))


def _rows(arrays: Iterable[Array]) -> int:
    counts = {len(array) for array in arrays}
    if len(counts) != 1:
        raise ValueError(f"arrays of {sorted(counts)} rows are no samples of several parts")
    return counts.pop()
