"""Sparse all-reduce: vectors of few non-zeros travel as pairs of index and value.

Recursive doubling in which what travels grows: two lists of pairs are merged, and where the pairs
come to take more bytes than the vector, the vector itself takes their place.  Or the split: each
rank sums a part of the places, and all gather the parts, as pairs or as they are.

Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler: "SparCML: high-performance sparse communication
for machine learning", SC 2019 (their SSAR_Recursive_double and SSAR_Split_allgather, with the
switch of their DSAR).  Or a ring, in which what sums have more of than summands is pruned at each
hop, for the caller to send again (Lin et al. 2018 name the remedy).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.errors import CollectiveError, InvalidBuffer
from collectives.execution.messages import TAGS_PER_PLAN
from collectives.execution.tags import Tags
from collectives.execution.traffic import Traffic
from collectives.execution.transport.mpi import largest_tag
from collectives.sparse_sums import PairSum
from collectives.sparse_vectors import Array, Stream, agreed, expect_rising, packed


def sparse_allreduce(
    comm: MPI.Intracomm,
    indices: npt.ArrayLike,
    values: npt.ArrayLike,
    length: int,
    *,
    dense_at: int | None = None,
    traffic: Traffic | None = None,
    algorithm: str = "recursive_doubling",
) -> tuple[Array, Array] | Array:
    """The sum over all ranks of vectors of ``length`` numbers, each given by its pairs.

    Bitwise the same on all ranks: partial sums are of neighbouring ranks, the lower ones on the
    left.  A sum that comes to 0 keeps its pair.  Sums of 16-bit numbers are rounded in every round.
    An index travels as the gap before it, in 2 bytes, and where 65,535 places or more lie between
    two, in 2 and its own.

    Cost: ceil(log2 p) rounds, two more where p is no power of two; in round k, the pairs of 2^k
    ranks merged, or ``length`` values if they are fewer bytes.  By ``split_allgather``: the pairs
    once, to the ranks that sum them, and (p-1)/p times the pairs of all ranks merged, or so much of
    ``length`` values; 2 (p-1) messages a rank.  And one all-gather of some 100 bytes a rank, by
    which the ranks agree that the calls belong together.

    Args:
        comm: a :class:`~collectives.Communicator`, or any other, which is duplicated for the call.
        indices: shape (pairs,), uint32 or uint64, rising; their number may differ between ranks.
        values: shape (pairs,), floating point or complex, ml_dtypes' types too.
        length: length of the vectors; the same on all ranks, as are the types.
        dense_at: pairs above which a vector travels, and is returned, as it is; the same on all
            ranks.  Default: where the pairs take more bytes than
            the vector.  A part of ``split_allgather`` has its share of them.
        traffic: counts what is sent.
        algorithm: ``recursive_doubling``, for few pairs; ``split_allgather``, for many, or where
            the ranks have the same places; ``pruned_ring``, whose sum is without the pairs that
            were taken off on the way, which a :class:`SparseAllreduce` alone has as ``pruned``;
            the same on all ranks.

    Returns:
        ``(indices, values)`` of the sum, or all its ``length`` values; the same form on all ranks.

    Raises:
        InvalidBuffer: on all ranks, if one has indices that are not rising or not below ``length``,
            arrays of other types or shapes, or a ``length``, ``dense_at``, ``traffic`` or
            ``algorithm`` that cannot be.
        MismatchError: on all ranks, if they differ in length, types, ``dense_at``, ``algorithm``.
    """
    with _ours(comm) as own:
        mine, length, limit = agreed(
            own._engine, indices, values, length, dense_at, traffic, algorithm
        )
        run = PairSum(own, mine, length, limit, traffic, largest_tag(), algorithm)
        run.Start()
        run.Wait()
    total = run.total
    return total.values if total.indices is None else (total.indices, total.values)


class SparseAllreduce(PairSum):
    """The plan of a sparse all-reduce: what :func:`sparse_allreduce` does, to be started again and
    again with other pairs.

    The ranks agree on length and types when it is made, and never again; its messages have tags of
    their own.
    """

    def __init__(
        self,
        comm: Communicator,
        length: int,
        dtype: npt.DTypeLike,
        algorithm: str = "recursive_doubling",
    ) -> None:
        """Binds it; collective.  Arguments as those of :func:`sparse_allreduce`.

        Raises:
            InvalidBuffer, MismatchError: on all ranks, as there.
            CollectiveError: there are more plans than tags, or sums are reproducible here.
        """
        with _ours(comm) as own:
            nothing = np.empty(0, np.uint32), np.empty(0, dtype)
            mine, size, limit = agreed(own._engine, *nothing, length, None, None, algorithm)
            tags = own._engine.resources.take_tags()
        self._tags: Tags | None = tags
        tag = (tags.number + 1) * TAGS_PER_PLAN
        super().__init__(own, mine, size, limit, None, tag, algorithm)

    def give(self, indices: Array, values: Array) -> None:
        """Sets the pairs of the next run, which the caller leaves alone until it is complete.

        Args:
            indices: shape (pairs,), uint32, rising and below the length.
            values: shape (pairs,), of the plan's type.

        Raises:
            InvalidBuffer: on this rank, before anything is sent; they are no such pairs.
        """
        kinds = self._index_type, self._value_type
        if (
            (indices.dtype, values.dtype) != kinds
            or indices.ndim != 1
            or (indices.shape != values.shape)
        ):
            raise InvalidBuffer(
                f"pairs of this plan are as many indices of {kinds[0]} as values of {kinds[1]}, "
                f"not {indices.shape} of {indices.dtype} and {values.shape} of {values.dtype}"
            )
        expect_rising(indices, self._length)
        self._mine = Stream(indices, np.ascontiguousarray(values))

    @property
    def given(self) -> int:
        """Bytes of the pairs that were given last."""
        indices, values = self._mine
        return values.nbytes + (0 if indices is None else packed(indices).nbytes)

    def Free(self) -> None:
        """Gives its tags back.

        Raises:
            RuntimeError: it is under way.
        """
        super().Free()
        self._tags = None


@contextmanager
def _ours(comm: MPI.Intracomm) -> Iterator[Communicator]:
    """``comm``, or one of ours on it for this call."""
    if isinstance(comm, Communicator):
        if comm.is_reproducible:
            raise CollectiveError(
                "sparse_allreduce sums in an order of its own, which reproducible=True excludes; "
                "use another communicator for it"
            )
        yield comm
        return
    ours = Communicator(comm)
    try:
        yield ours
    except CollectiveError:  # on all ranks, so that they can free it together
        ours.close()
        raise
    ours.close()
