"""BLAS threads of a rank: at most its share of the node's cores."""

import os

from mpi4py import MPI
from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]


def limit_blas_threads(comm: MPI.Intracomm) -> threadpool_limits:
    """Shares the cores of each node among its ranks, until the context ends; collective.

    A BLAS starts a thread a core in each process, which is too many for several ranks.  Bound and
    unbound ranks get the same share, as all cores of the node's ranks count.  Lower limits of the
    environment (``OMP_NUM_THREADS`` and the like) stay.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    cores = set().union(*node.allgather(os.sched_getaffinity(0)))
    started = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    limit = max(1, min([len(cores) // node.size, *started]))
    node.Free()
    return threadpool_limits(limit, user_api="blas")
