"""Calls and messages between ranks of this machine, measured by ``mpiexec``."""

import json
import os
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpitrain.config import ConfigError
from mpitrain.search.on_ranks import on_ranks

if TYPE_CHECKING:
    from collectives import Communicator

#: Bytes of the sums.
_SIZES = 1 << 10, 1 << 14, 1 << 18, 1 << 22


class NodeLink(NamedTuple):
    """``call`` seconds of a collective, whatever its size, and ``beta`` seconds a byte."""

    call: float
    beta: float


def measured(ranks: int) -> NodeLink:
    """The link among so many ranks of this machine, at most one for each of its cores.

    Cost: a start of ``mpiexec``, and a fraction of a second.

    Raises:
        ConfigError: they cannot be started here.
    """
    count = max(2, min(ranks, len(os.sched_getaffinity(0))))
    try:
        told = on_ranks(count, __name__)
    except ConfigError as error:
        raise ConfigError(
            f"ranks cannot be started to measure their link ({error}); give it, as --inside 0.5,5 "
            "--call 30"
        ) from error
    return NodeLink(*json.loads(told.splitlines()[-1]))


def main() -> None:
    """Print the link of the ranks of ``mpiexec`` that explains their sums best."""
    from mpi4py import MPI

    from collectives import Communicator
    from mpitrain.memory import keep_freed

    keep_freed()
    with Communicator(MPI.COMM_WORLD) as comm:
        seconds = np.array([_seconds(comm, nbytes) for nbytes in _SIZES])
        if comm.rank == 0:
            sent = 2 * (comm.size - 1) / comm.size * np.array(_SIZES)
            # The least sum of squared relative errors.
            rows = np.stack([np.ones(len(_SIZES)), sent], axis=1) / seconds[:, None]
            (call, beta), *_ = np.linalg.lstsq(rows, np.ones(len(_SIZES)), rcond=None)
            print(json.dumps([max(0.0, call), max(beta, 1e-12)]))


def _seconds(comm: "Communicator", nbytes: int, times: int = 30) -> float:
    """Seconds of a sum that is bound anew, of the slowest rank; the best of some."""
    array, found = np.zeros(nbytes // 4, np.float32), []
    for _ in range(times):
        comm.Barrier()
        start = perf_counter()
        plan = comm.Allreduce_init(array.copy(), array)
        plan.Start()
        plan.Wait()
        plan.Free()
        found.append(perf_counter() - start)
    return float(np.max(comm.allgather(found), axis=0).min())


if __name__ == "__main__":
    main()
