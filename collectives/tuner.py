"""``algorithm="auto"``: which algorithm a call gets, and why."""

from typing import NamedTuple


class Choice(NamedTuple):
    """An algorithm's name and the sentence that explains it."""

    algorithm: str
    reason: str


#: From this size the ring's bandwidth outweighs what its rounds cost in Python, on one node over
#: two-sided messages (``make bench``).
RING_BYTES = 1 << 20
#: From this size loads and stores in shared memory beat the library's messages.
SHARED_BYTES = 4 << 10


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
    if shared and size > 1 and nbytes >= SHARED_BYTES:
        name = {"allreduce": "direct", "allgather": "direct", "alltoall": "pairwise"}[collective]
        return Choice(name, f"{nbytes} bytes >= {SHARED_BYTES} in shared memory")
    if not native:
        name = {"allreduce": "butterfly", "allgather": "ring", "alltoall": "pairwise"}[collective]
        return Choice(name, "this MPI has no such datatype")
    if not commutes:
        return Choice("native", "the operation does not commute")
    if collective == "allreduce" and size > 1 and nbytes >= RING_BYTES:
        return Choice("ring", f"{nbytes} bytes >= {RING_BYTES}: bandwidth decides")
    return Choice("native", f"{nbytes} bytes: the library's latency decides")
