"""Calls and messages between ranks of this machine, measured by ``mpiexec``."""

import json
import os
import subprocess
import sys
from time import perf_counter
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.config import ConfigError

#: Bytes of a small and of a large sum.
_SIZES = 256, 1 << 22


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
    words = [os.environ.get("MPIEXEC", "mpiexec"), "-n", str(count), sys.executable, "-m", __name__]
    try:
        done = subprocess.run(words, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "").strip().rpartition("\n")[2] or error
        raise ConfigError(
            f"{words[0]}: ranks cannot be started to measure their link ({told}); give it, as "
            "--inside 0.5,5 --call 30"
        ) from error
    return NodeLink(*json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print the link of the ranks of ``mpiexec``: the best of many sums of two sizes."""
    with Communicator(MPI.COMM_WORLD) as comm:
        small, large = (min(_seconds(comm, nbytes)) for nbytes in _SIZES)
        if comm.rank == 0:
            sent = 2 * (comm.size - 1) / comm.size * (_SIZES[1] - _SIZES[0])
            print(json.dumps([small, max(0.0, large - small) / sent]))


def _seconds(comm: Communicator, nbytes: int, times: int = 30) -> list[float]:
    """Seconds of sums of ordinary arrays, of the slowest rank."""
    array, found = np.zeros(nbytes // 4, np.float32), []
    for _ in range(times):
        comm.Barrier()
        start = perf_counter()
        comm.Allreduce(MPI.IN_PLACE, array)
        found.append(perf_counter() - start)
    return [float(own) for own in np.max(comm.allgather(found), axis=0)]


if __name__ == "__main__":
    main()
