"""Which MPI library this is, as far as its speed depends on it."""

from mpi4py import MPI


def library() -> str:
    """The vendor, and the thread level where it is not the highest: MPICH, for one, has faster
    collectives for programs of one thread."""
    vendor, _ = MPI.get_vendor()
    level = {
        MPI.THREAD_SINGLE: ", single",
        MPI.THREAD_FUNNELED: ", funneled",
        MPI.THREAD_SERIALIZED: ", serialized",
    }.get(MPI.Query_thread(), "")
    return f"{vendor}{level}"
