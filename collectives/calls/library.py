"""Which MPI library this is, in words."""

from mpi4py import MPI

#: Items of one block; not every MPI library can count more.
COUNTABLE = (1 << 31) - 1
#: Names of MPI's thread levels.
THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


def release() -> str:
    """Vendor and version, as in ``Open MPI 5.0.8``."""
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def library() -> str:
    """The vendor, and the thread level where it is not the highest: MPICH, for one, has faster
    collectives for programs of one thread."""
    vendor, _ = MPI.get_vendor()
    level = MPI.Query_thread()
    return vendor if level == MPI.THREAD_MULTIPLE else f"{vendor}, {THREAD_LEVELS[level]}"
