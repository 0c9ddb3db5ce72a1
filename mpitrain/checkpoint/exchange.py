"""State of exchanges in checkpoints, on any number of replicas.

Residuals of codecs belong to replicas, and their sum counts: another number of replicas shares the
old residuals out, so that the sum stays.
"""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from mpitrain.arrays import Array
from mpitrain.checkpoint.manifest import EXCHANGE, EXCHANGE_STATE
from mpitrain.checkpoint.workers import among
from mpitrain.parallel.arena import Tensor
from mpitrain.parallel.store import Piece, overlaps
from mpitrain.parallel.summation import KeptElements, Summation

if TYPE_CHECKING:
    from mpitrain.checkpoint.reader import CheckpointReader
    from mpitrain.training.parts import Parts


#: Part of a tensor's state on a rank: section in the checkpoint, tensor, first element in the
#: arena, and memory of the elements, shape (elements,).
KeptPart = tuple[str, Tensor, int, Array]


def kept_parts(parts: "Parts", *, written: bool = False) -> Iterator[tuple[KeptElements, KeptPart]]:
    """State of tensors' elements on this rank, or the part of it that the rank writes."""
    replica = parts.grid.data.rank
    for kept in chain.from_iterable(one.kept() for one in _keepers(parts)):
        owner = f"@{replica}" if kept.is_per_replica else ""
        section = f"{EXCHANGE}{kept.name}{owner}"
        piece = Piece(kept.start, kept.values, kept.values, "")
        for within in _answered(parts, piece) if written and kept.is_shared else [None]:
            for tensor, part in overlaps(parts.arena.tensors, piece, within):
                yield kept, (section, tensor, kept.start + part.start, kept.values[part])


def _answered(parts: "Parts", piece: Piece) -> Iterator[slice]:
    """Parts of a piece that this rank writes, where several ranks have the same."""
    for own in parts.gradient.owned():
        if parts.config.sync.drifts:  # each worker answers for all elements
            own = among(own, parts.grid)
        low, high = max(own.start, piece.start), min(own.stop, piece.stop)
        if low < high:
            yield slice(low - piece.start, high - piece.start)


def state(parts: "Parts") -> dict[str, Array]:
    """Other arrays of exchanges, the same on all replicas, by their names in the checkpoint."""
    place, ranks = parts.grid.place, parts.grid.layout.tensor
    part = f"@{place.tensor}of{ranks}" if ranks > 1 else ""
    return {
        f"{name}{part}": array for one in _keepers(parts) for name, array in one.state().items()
    }


def _keepers(parts: "Parts") -> list[Summation]:
    return [parts.summation, *(parts.strategy.keepers if parts.strategy else ())]


def restore(parts: "Parts", checkpoint: "CheckpointReader") -> list[str]:
    """Restores the state of exchanges on this rank; CheckpointError: an array is missing.

    Returns names of arrays that begin anew, as the checkpoint has them for another layout, or of
    gradients where workers exchange weights now, or the other way round.
    """
    is_alike = checkpoint.job.sync.drifts == parts.config.sync.drifts
    for kept, (_, tensor, start, values) in kept_parts(parts):
        values[...] = 0
        for section in _sources(parts, kept, checkpoint, tensor) if is_alike else ():
            own = tensor.part(checkpoint.tensor(section, tensor.name)).ravel()
            values[...] += own[start - tensor.start :][: values.size]
    found = set(checkpoint.named(EXCHANGE_STATE))
    had = {section for section in checkpoint.sections if section.startswith(EXCHANGE)}
    anew = [] if is_alike else sorted({one[len(EXCHANGE) :].partition("@")[0] for one in had})
    for name, array in state(parts).items():
        saved = checkpoint.tensor(EXCHANGE_STATE, name) if name in found else np.empty(0)
        if saved.shape == array.shape:  # else of a layout that cuts tensors elsewhere
            array[...] = saved
        elif found:
            anew.append(name)
    return anew


def _sources(
    parts: "Parts", kept: KeptElements, checkpoint: "CheckpointReader", tensor: Tensor
) -> list[str]:
    """Sections whose sum this replica takes."""
    name = f"{EXCHANGE}{kept.name}"
    numbers = sorted(
        int(section.rpartition("@")[2])
        for section in checkpoint.sections
        if section.startswith(f"{name}@") and tensor.name in checkpoint.named(section)
    )
    if not kept.is_per_replica:
        if tensor.name in checkpoint.named(name):
            return [name]
        return [f"{name}@{number}" for number in numbers]  # where each replica kept its part
    replica, replicas = parts.grid.data.rank, parts.grid.data.size
    return [f"{name}@{number}" for number in numbers if number % replicas == replica]
