"""``algorithm="auto"``: which algorithm a call gets, and why.

The thresholds are those of one node, measured by ``make bench`` on 2 ranks with a core each and on
4 that share two cores.
"""

from typing import NamedTuple


class Choice(NamedTuple):
    """An algorithm's name and the sentence that explains it."""

    algorithm: str
    reason: str


#: From here loads and stores in shared memory beat the library: by one exchange of two ranks, or by
#: each rank reducing its slice for all.
SHARED_PAIR_BYTES = 4 << 10
SHARED_BYTES = 16 << 10
#: From here one exchange of everything beats the library on two ranks, up to where the reduction of
#: all of it on both costs more than a second round.
PAIR_BYTES = 16 << 10
#: From here the ring's bandwidth outweighs its rounds in Python.
RING_BYTES = 4 << 20

_SLICES = {"alltoall": "pairwise"}  # the others: direct
_WITHOUT_NATIVE = {
    "allreduce": "butterfly",
    "reduce_scatter": "direct",
    "broadcast": "binomial_tree",
}


def choose(
    collective: str, nbytes: int, size: int, commutes: bool, native: bool, shared: bool = False
) -> Choice:
    """The algorithm for a call; a function of what all ranks agree on, so all choose the same.

    Args:
        nbytes: size of the larger buffer.
        commutes: whether the operation commutes (true where there is none).
        native: whether this MPI has the datatype.
        shared: whether the buffers lie in memory that all ranks can address.
    """
    allreduce = collective == "allreduce"
    pair = allreduce and size == 2
    if shared and pair and SHARED_PAIR_BYTES <= nbytes < 8 * SHARED_BYTES:
        return Choice("butterfly", f"{nbytes} bytes of 2 ranks in shared memory: one exchange")
    if shared and size > 1 and nbytes >= SHARED_BYTES and collective != "broadcast":
        return Choice(
            _SLICES.get(collective, "direct"), f"{nbytes} bytes in shared memory: each rank a slice"
        )
    if not native:
        name = {**_SLICES, **_WITHOUT_NATIVE}.get(collective, "ring")
        return Choice(name, "this MPI has no such datatype")
    if pair and PAIR_BYTES <= nbytes < RING_BYTES:
        return Choice("butterfly", f"{nbytes} bytes of 2 ranks: one exchange")
    if allreduce and commutes and size > 1 and nbytes >= RING_BYTES:
        return Choice("ring", f"{nbytes} bytes: bandwidth decides")
    return Choice("native", f"{nbytes} bytes: the library's latency decides")
