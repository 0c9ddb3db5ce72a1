"""Calls as all ranks draw them: what is asked for, with how many items where, and by which words.

A :class:`Drawn` call is the same on all ranks; kinds of buffers and forms of specifications are
drawn for each rank apart, as programs of one's own differ between ranks, too.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.algorithms import ALGORITHMS, build
from collectives.errors import CollectiveError
from tests.soak.kinds import KINDS, ROOM

#: MPI's names, and ours of the registry.
COLLECTIVES = {
    "Allreduce": "allreduce",
    "Reduce": "reduce",
    "Bcast": "broadcast",
    "Allgather": "allgather",
    "Gather": "gather",
    "Scatter": "scatter",
    "Alltoall": "alltoall",
    "Reduce_scatter_block": "reduce_scatter",
    "Reduce_scatter": "reduce_scatter",
    "Scan": "scan",
    "Exscan": "exscan",
    "Barrier": "barrier",
    "Allgatherv": "allgather",
    "Gatherv": "gather",
    "Scatterv": "scatter",
    "Alltoallv": "alltoall",
}
VECTORS = ("Allgatherv", "Gatherv", "Scatterv", "Alltoallv")
ROOTED = ("Reduce", "Bcast", "Gather", "Scatter", "Gatherv", "Scatterv")
REDUCING = ("Allreduce", "Reduce", "Reduce_scatter_block", "Reduce_scatter", "Scan", "Exscan")
WAYS = ("blocking", "blocking", "blocking", "nonblocking", "persistent")
TYPES = ("f8", "f8", "f4", "i4", "i8", "u1", "c16", "i2", "u4", "c8", "?")
SIZES = (0, 1, 2, 7, 100, 1000, 1000, 4000)
LARGE = 50_000
_OPERATIONS = {
    "SUM": MPI.SUM,
    "MAX": MPI.MAX,
    "MIN": MPI.MIN,
    "PROD": MPI.PROD,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
    "LAND": MPI.LAND,
    "LOR": MPI.LOR,
    "LXOR": MPI.LXOR,
}
#: Of each kind of number.
_OF_KIND = {
    "f": ("SUM", "SUM", "MAX", "MIN", "PROD"),
    "c": ("SUM", "SUM", "PROD"),
    "i": ("SUM", "SUM", "MAX", "MIN", "PROD", "BAND", "BOR", "BXOR", "LAND"),
    "u": ("SUM", "SUM", "MAX", "MIN", "PROD", "BAND", "BOR", "BXOR", "LOR"),
    "b": ("LAND", "LOR", "LXOR"),
}
_PLAIN = ("bare",) * 5 + ("type", "count", "displacement", "code", "tuple")
_UNEVEN = ("four parts", "pair", "counts", "counts and a pair of arrays")


@dataclass(frozen=True)
class Side:
    """The send or receive buffer of one rank.

    Attributes:
        counts: items of each block; of one, where there are no blocks.
        starts: items at which they begin, of v-variants.
        before, after: items of the object that the call has nothing to do with.
        form: of the specification.
        kind: of the object.
        listed: the specification is the list that every such call is given, changed in place.
        kept: the object is the one of the call before.
        extent: items from the beginning of one to that of the next: 2 for a type with gaps.
    """

    counts: tuple[int, ...]
    starts: tuple[int, ...] | None
    before: int
    after: int
    form: str
    kind: str
    listed: bool
    kept: bool
    extent: int = 1

    @property
    def used(self) -> int:
        """Items from the first that the call touches to the last."""
        if self.starts is None:
            return sum(self.counts)
        return max(s + c for s, c in zip(self.starts, self.counts))

    @property
    def items(self) -> int:
        return (self.before + self.used + self.after) * self.extent

    def specification(self, obj: Any, datatype: MPI.Datatype, code: str) -> Any:
        """What the call is given."""
        if self.starts is not None:
            starts = [self.before + start for start in self.starts]
            match self.form:
                case "four parts":
                    return [obj, list(self.counts), starts, datatype]
                case "pair":
                    return [obj, (self.counts, starts), datatype]
                case "counts":
                    return [obj, list(self.counts), datatype]  # a tuple is a pair to mpi4py
                case _:
                    return [obj, (np.array(self.counts), np.array(starts)), datatype]
        match self.form:
            case "bare":
                return obj
            case "type":
                return [obj, datatype]
            case "code":
                return [obj, code]
            case "count":
                return [obj, self.counts[0], datatype]
            case "tuple":
                return (obj, self.counts[0], datatype)
            case _:
                return [obj, (self.counts[0], self.before), datatype]


@dataclass(frozen=True)
class Drawn:
    """A call.

    Attributes:
        name: as ``Allreduce``.
        way: blocking, nonblocking or persistent.
        algorithm: that is asked for, if one is.
        whole: the numbers are small and whole, so that the order of a sum does not matter.
        counts: ``recvcounts`` of a reduce-scatter.
        tells_counts: it is given them; otherwise each rank's own receive buffer says its count.
        sides: for each rank, the send and the receive buffer; ``None``: no buffer, ``"in place"``.
        again: the same is done so many times, with other numbers and buffers made anew.
    """

    name: str
    way: str
    algorithm: str | None
    dtype: np.dtype
    op: str
    root: int
    whole: bool
    counts: tuple[int, ...] | None
    tells_counts: bool
    sides: tuple[tuple[Side | str | None, Side | str | None], ...]
    again: int

    @property
    def operation(self) -> MPI.Op:
        return _OPERATIONS[self.op]

    @property
    def is_exact(self) -> bool:
        """Whether the result does not depend on the order of operations."""
        moves = self.name not in REDUCING
        return moves or self.whole or self.dtype.kind in "iub" or self.op in ("MAX", "MIN")

    def __str__(self) -> str:
        words = [self.way, self.name, f"algorithm={self.algorithm}", str(self.dtype)]
        if self.name in REDUCING:
            words.append(self.op)
        if self.name in ROOTED:
            words.append(f"root {self.root}")
        for rank, sides in enumerate(self.sides):
            told = " -> ".join(_in_words(side) for side in sides)
            words.append(f"\n  rank {rank}: {told}")
        return " ".join(words)


def _in_words(side: Side | str | None) -> str:
    if not isinstance(side, Side):
        return str(side)
    counts = side.counts if side.starts is not None or len(side.counts) > 1 else side.counts[0]
    kept = ", the one of the call before" if side.kept else ""
    listed = ", in the same list" if side.listed and side.form not in ("bare", "tuple") else ""
    gaps = ", with gaps" if side.extent > 1 else ""
    return f"{side.kind} ({side.form} of {counts}{gaps}{listed}{kept})"


def algorithms(size: int) -> dict[str, list[str]]:
    """Those that can be asked for on so many ranks, for each of MPI's names."""
    found: dict[str, list[str]] = {}
    for name, collective in COLLECTIVES.items():
        known = ["native", "auto"]
        for entry in ALGORITHMS:
            uneven = name in VECTORS or name == "Reduce_scatter"
            if entry.collective != collective or (uneven and not entry.uneven):
                continue
            for spelled in (entry.name, f"{entry.name}:segments=3"):
                try:
                    build(collective, spelled, size)
                    known.append(spelled)
                except CollectiveError:
                    pass  # not of so many ranks
        found[name] = known
    return found


class Draw:
    """Draws calls for ``size`` ranks.

    Args:
        kinds, names, ways: that there may be; ``None`` or empty for all.
    """

    def __init__(
        self,
        seed: str,
        size: int,
        kinds: list[str] | None = None,
        names: list[str] | None = None,
        ways: list[str] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.size = size
        self.kinds = kinds or list(KINDS)
        self.names = names or list(COLLECTIVES)
        self.ways = ways or list(WAYS)
        self.algorithms = algorithms(size)

    def call(self) -> Drawn:
        rng = self.rng
        name = rng.choice(self.names)
        dtype = np.dtype(rng.choice(TYPES))
        way = rng.choice(self.ways)
        length = self._length(dtype)
        counts = None
        if name in (*VECTORS, "Reduce_scatter"):
            counts = tuple(self._short(length) for _ in range(self.size))
        root = rng.randrange(self.size)
        in_place = rng.random() < 0.2
        if name == "Alltoallv":
            table = [[self._short(length) for _ in range(self.size)] for _ in range(self.size)]
            for i in range(self.size if in_place else 0):
                for j in range(i):
                    table[i][j] = table[j][i]
            pairs = [(tuple(table[r]), tuple(row[r] for row in table)) for r in range(self.size)]
        else:
            pairs = [self._counts(name, rank, root, length, counts) for rank in range(self.size)]
        # MPICH's own Allgatherv takes another algorithm on ranks whose types have gaps.
        gaps = (rng.choice((1, 1, 1, 2)),) if name in VECTORS else (1, 1, 1, 2)
        gaps = (1,) if name in REDUCING else gaps
        sides = tuple(
            self._sides(name, rank, root, in_place, gaps, *pairs[rank]) for rank in range(self.size)
        )
        algorithm = rng.choice([None, None, *self.algorithms[name]])
        if name == "Alltoallv" and in_place and way != "blocking" and algorithm == "native":
            algorithm = None  # Open MPI's own is wrong
        if name == "Reduce_scatter" and in_place and algorithm == "native":
            algorithm = None  # MPICH's own copies a block onto itself
        return Drawn(
            name,
            way,
            algorithm,
            dtype,
            rng.choice(_OF_KIND[dtype.kind]),
            root,
            dtype.kind in "iub" or rng.random() < 0.5,
            counts,
            in_place or rng.random() < 0.7,
            sides,
            rng.choice((1, 1, 2, 5, 8)),
        )

    def _length(self, dtype: np.dtype) -> int:
        """Items of a block, so that all blocks have room in what is used in parts."""
        rng = self.rng
        if rng.random() < 0.04:
            return LARGE // self.size
        return min(rng.choice(SIZES), ROOM // (2 * dtype.itemsize * self.size))

    def _short(self, length: int) -> int:
        return self.rng.choice((0, length, self.rng.randint(0, length)))

    def _counts(
        self, name: str, rank: int, root: int, length: int, counts: tuple[int, ...] | None
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Items of each block that a rank sends and receives; ``None``: it has no such buffer."""
        one, many, at_root = (length,), (length,) * self.size, rank == root
        match name:
            case "Allreduce" | "Scan" | "Exscan":
                return one, one
            case "Reduce":
                return one, one if at_root else None
            case "Bcast":
                return None, one
            case "Allgather":
                return one, many
            case "Gather":
                return one, many if at_root else None
            case "Scatter":
                return many if at_root else None, one
            case "Alltoall":
                return many, many
            case "Reduce_scatter_block":
                return many, one
            case "Barrier":
                return None, None
        assert counts is not None
        match name:
            case "Reduce_scatter":
                return (sum(counts),), (counts[rank],)
            case "Allgatherv":
                return (counts[rank],), counts
            case "Gatherv":
                return (counts[rank],), counts if at_root else None
            case _:
                return counts if at_root else None, (counts[rank],)

    def _sides(
        self,
        name: str,
        rank: int,
        root: int,
        in_place: bool,
        gaps: tuple[int, ...],
        sent: tuple[int, ...] | None,
        received: tuple[int, ...] | None,
    ) -> tuple[Side | str | None, Side | str | None]:
        send = self._side(sent, name in ("Scatterv", "Alltoallv"), gaps)
        recv = self._side(received, name in ("Allgatherv", "Gatherv", "Alltoallv"), gaps)
        if not in_place or name in ("Bcast", "Barrier"):
            return send, recv
        if name in ("Scatter", "Scatterv"):
            return send, "in place" if rank == root else recv
        if name in ROOTED:
            return "in place" if rank == root else send, recv
        if name in ("Reduce_scatter", "Reduce_scatter_block"):  # the result goes to its beginning
            assert send is not None
            plain = replace(send, before=0, after=0)
            if plain.form not in ("bare", "type", "code"):
                plain = replace(plain, form="type")
            return "in place", plain
        return "in place", recv

    def _side(
        self, counts: tuple[int, ...] | None, uneven: bool, gaps: tuple[int, ...]
    ) -> Side | None:
        """A buffer of these blocks; drawn whatever comes of it, so that all ranks draw alike."""
        rng = self.rng
        form = rng.choice(_UNEVEN if uneven else _PLAIN)
        kind = rng.choice(self.kinds)
        listed, kept = rng.random() < 0.3, rng.random() < 0.5
        before, after = rng.choice((0, 0, 1, 5)), rng.choice((0, 0, 1, 5))
        gap = rng.choice((0, 0, 3))
        extent = rng.choice(gaps)
        if extent > 1 and form in ("bare", "code"):
            form = "type"
        if counts is None:
            return None
        starts = None
        if uneven:
            gap = 0 if form == "counts" else gap
            starts = tuple(sum(counts[:j]) + gap * j for j in range(len(counts)))
        if form not in ("displacement", *_UNEVEN) or form == "counts":
            before = 0
        if form in ("bare", "type", "code"):
            after = 0
        return Side(counts, starts, before, after, form, kind, listed, kept, extent)
