"""Memory in which processes that read ahead hand samples over."""

import mmap
import os
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from collectives.files import anonymous
from mpitrain.arrays import Shape
from mpitrain.data.dataset import Indexed, Samples

#: Number of samples of an answer, and the types and shapes of one of them, by array.
Told = tuple[int, Mapping[str, tuple[Any, Shape]]]


class Slot:
    """Memory that a process and its reader share, and that either of them may enlarge."""

    def __init__(self, size: int) -> None:
        self._file = os.fdopen(anonymous("samples"), "r+b")
        self._file.truncate(size)
        self._memory = mmap.mmap(self._file.fileno(), size)

    def memory(self, size: int) -> mmap.mmap:
        """The memory, of at least this size."""
        if len(self._memory) < size:
            if os.fstat(self._file.fileno()).st_size < size:
                self._file.truncate(size)
            self._memory = mmap.mmap(self._file.fileno(), 0)
        return self._memory


class Room:
    """Layout of a request's arrays in a slot."""

    def __init__(self, parts: Mapping[str, Indexed], most: int) -> None:
        firsts = [vars(part[:1]) for part in parts.values()]
        self.bytes = max(
            sum(_in_slot(most * array.nbytes) for array in first.values()) for first in firsts
        ) or 1  # fmt: skip

    def samples(self, slot: Slot, told: Told) -> Samples:
        """Arrays in the slot of an answer."""
        count, kinds = told
        sizes = {n: count * prod(shape) * kind.itemsize for n, (kind, shape) in kinds.items()}
        memory = slot.memory(sum(map(_in_slot, sizes.values())))
        arrays, start = {}, 0
        for name, (kind, shape) in kinds.items():
            flat = np.frombuffer(memory, kind, count * prod(shape), start)
            arrays[name] = flat.reshape(count, *shape)
            start += _in_slot(sizes[name])
        return Samples(**arrays)

    def put(self, slot: Slot, samples: Samples) -> Told:
        """Write samples into a slot; returns what their reader is told."""
        found = vars(samples)
        kinds = {name: (array.dtype, array.shape[1:]) for name, array in found.items()}
        told = len(found["labels"]), kinds
        for name, array in vars(self.samples(slot, told)).items():
            array[...] = found[name]
        return told


def _in_slot(size: int) -> int:
    """Bytes for an array of this size, so that the next one is aligned."""
    return -(-size // 64) * 64
