"""No more BLAS threads than a rank has cores to itself."""

import os

from mpi4py import MPI
from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]


def limit_blas_threads(comm: MPI.Intracomm) -> threadpool_limits:
    """Share the cores of each node among its ranks; collective.

    A BLAS starts a thread a core in each process, and p ranks would start p times too many.  Counts
    the cores that any rank of the node may run on, so ranks bound to cores of their own and
    ranks that are bound to none come out the same.  Fewer that the environment asks for
    (``OMP_NUM_THREADS`` and the like) stay fewer.

    Returns:
        A context manager; the former limits are back at its end.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    cores = set().union(*node.allgather(os.sched_getaffinity(0)))
    started = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    limit = max(1, min([len(cores) // node.size, *started]))
    node.Free()
    return threadpool_limits(limit, user_api="blas")
