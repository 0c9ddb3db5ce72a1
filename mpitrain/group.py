"""Groups of ranks that share items, and each rank's part."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.arrays import Array, Shape, array_namespace


def share(length: int, rank: int, size: int) -> slice:
    """The contiguous part of ``length`` items for ``rank`` of ``size``.

    Parts follow one another in rank order, and their lengths differ by one item at most; with more
    ranks than items some parts are empty.
    """
    return slice(rank * length // size, (rank + 1) * length // size)


def cut(values: Any, axis: int | None, bounds: slice, blocks: int = 1) -> Any:
    """A part of an array or a tensor: ``bounds`` in each of ``blocks`` equal runs of an axis.

    Without an axis, it is the whole.  It is a view where the part lies in one run.
    """
    if axis is None:
        return values
    before, length, behind = values.shape[:axis], values.shape[axis], values.shape[axis + 1 :]
    folded = values.reshape(*before, blocks, length // blocks, *behind)
    part = folded[(slice(None),) * (axis + 1) + (bounds,)]
    return part.reshape(*before, blocks * part.shape[axis + 1], *behind)


class TensorGroup:
    """Ranks that share each layer.

    Attributes:
        comm: communicator of the ranks; None for a single rank.
        rank, size: this rank's number in ``comm``, and the number of ranks.
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self.comm = comm if comm is not None and comm.size > 1 else None
        self.rank: int = self.comm.rank if self.comm else 0
        self.size: int = self.comm.size if self.comm else 1

    def share(self, length: int) -> slice:
        """This rank's part of ``length`` items."""
        return share(length, self.rank, self.size)

    def sum(self, x: Array, op: MPI.Op = MPI.SUM) -> Array:
        """Sum of x over the ranks, the same bits on all of them.

        x stays as it is; the result is a new array, or x itself on a single rank.
        """
        if self.comm is None:
            return x
        y = array_namespace(x).array(x, order="C")
        with self.comm.waiting("allreduce of layers"):
            self.comm.Allreduce(MPI.IN_PLACE, y, op=op)
        return y

    def all(self, x: Array) -> Array:
        """The arrays ``x`` of all ranks, in rank order, along a new axis 0."""
        if self.comm is None:
            return x[None]
        xp = array_namespace(x)
        found = xp.empty((self.size, *x.shape), x.dtype)
        with self.comm.waiting("allgather of layers"):
            self.comm.Allgather(xp.ascontiguousarray(x), found)
        return found

    def gather(self, x: Array) -> Array:
        """The arrays x_NT... of all ranks, concatenated along axis 1."""
        if self.comm is None:
            return x
        parts = array_namespace(x).moveaxis(self.all(x), 0, 1)
        return parts.reshape(len(x), self.size * x.shape[1], *x.shape[2:])

    def exchange(
        self, parts: Sequence[Array], shapes: Sequence[Shape], algorithm: str | None = None,
        *, is_even: bool = False,
    ) -> list[Array]:  # fmt: skip
        """The arrays that each rank has for this one, of these shapes; ``parts[r]`` is for rank r.

        All have one type.  ``algorithm``: as ``Communicator.Alltoallv`` takes it.  ``is_even``: all
        ranks know that all parts have one size; such a call is parsed once.
        """
        if self.comm is None:
            return list(parts)
        xp, sizes = array_namespace(parts[0]), [prod(shape) for shape in shapes]
        own = xp.concatenate([part.reshape(-1) for part in parts])
        if is_even:
            found = xp.empty(sum(sizes), own.dtype)
            self.comm.Alltoall(own.view(np.uint8), found.view(np.uint8), algorithm=algorithm)
        else:
            found = self.exchange_rows(own, [part.size for part in parts], sizes, algorithm)
        every = xp.split(found, np.cumsum(sizes)[:-1].tolist())
        return [part.reshape(shape) for part, shape in zip(every, shapes, strict=True)]

    def exchange_rows(
        self, x: Array, sent: Sequence[int], received: Sequence[int], algorithm: str | None = None
    ) -> Array:
        """The rows that each rank has for this one, ``received[r]``, for ``sent[r]`` rows of x."""
        if self.comm is None:
            return x
        xp, width = array_namespace(x), prod(x.shape[1:])
        found = xp.empty((sum(received), *x.shape[1:]), x.dtype)
        self.comm.Alltoallv(
            [xp.ascontiguousarray(x), [count * width for count in sent]],
            [found, [count * width for count in received]],
            algorithm=algorithm,
        )
        return found

    def scatter(self, x: Array) -> Array:
        """This rank's part, along axis 1, of the sum of x_NT... over the ranks."""
        if self.comm is None:
            return x
        xp = array_namespace(x)
        samples, positions, *rest = x.shape
        if positions % self.size:
            raise ValueError(
                f"{positions} positions cannot be shared equally by {self.size} tensor ranks"
            )
        by_part = x.reshape(samples, self.size, positions // self.size, *rest)
        parts = xp.ascontiguousarray(xp.moveaxis(by_part, 1, 0))
        own = xp.empty(parts.shape[1:], x.dtype)
        self.comm.Reduce_scatter_block(parts, own)
        return own
