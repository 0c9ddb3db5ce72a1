"""Cost of the first call on an array, which binds a plan, beside later ones.

mpirun -n 2 python -m benchmarks.first_call -b 1M -e 1G -f 4
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, process_time

import numpy as np
from mpi4py import MPI

from collectives.bench.inputs import sizes
from collectives.bench.measure import allocator
from collectives.commands.arguments import size
from collectives.communicator import Communicator

_TURNS = 3


def report_first(comm: Communicator, lengths: Sequence[int], memories: Sequence[str]) -> None:
    """Prints, on rank 0, milliseconds of all-reduces in place by ``auto`` beside native's: each
    first call on arrays of their own, the least of three such.

    Args:
        lengths: bytes of an array.
        memories: as the benchmark names them.
    """
    heads = [
        "bytes",
        "memory",
        "native",
        "first",
        "second",
        "nonblocking",
        "its second",
        "native's",
    ]
    if comm.rank == 0:
        print("# milliseconds, largest of the ranks, wall and (CPU); least of 3")
        print("# nonblocking calls beside native's nonblocking one")
        print("".join(head.rjust(17) for head in heads), flush=True)
    for nbytes in lengths:
        for memory in memories:
            times = np.min([_times(comm, nbytes, memory) for _ in range(_TURNS)], axis=0)
            comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX, algorithm="native")
            if comm.rank == 0:
                cells = [f"{1e3 * wall:.1f} ({1e3 * cpu:.1f})".rjust(17) for wall, cpu in times]
                print(f"{nbytes:>17}{memory:>17}{''.join(cells)}", flush=True)


def _times(comm: Communicator, nbytes: int, memory: str) -> list[tuple[float, float]]:
    """Seconds of each call, and of this rank's CPU."""
    allocate = allocator(comm, memory)

    def array() -> np.ndarray:
        items = allocate(max(1, nbytes // 4), np.float32)
        items[...] = 1
        return items

    def timed(call: Callable[[], object]) -> tuple[float, float]:
        comm.Barrier(algorithm="native")
        begun, used = perf_counter(), process_time()
        call()
        return perf_counter() - begun, process_time() - used

    items = array()
    blocking = partial(comm.Allreduce, MPI.IN_PLACE, items)
    found = [timed(partial(blocking, algorithm="native")), timed(blocking), timed(blocking)]
    del items, blocking
    items = array()
    begun = partial(comm.Iallreduce, MPI.IN_PLACE, items)
    found += [timed(lambda: begun().Wait()), timed(lambda: begun().Wait())]
    return [*found, timed(lambda: begun(algorithm="native").Wait())]


def main() -> int:
    """Measures the sizes and memories that the command line names."""
    parser = argparse.ArgumentParser(prog="benchmarks.first_call", description=__doc__)
    add = parser.add_argument
    add("-b", "--minbytes", type=size, default=1 << 20, help="smallest array (1M)")
    add("-e", "--maxbytes", type=size, default=1 << 26, help="largest array (64M)")
    add("-f", "--stepfactor", type=int, default=4, help="factor between sizes (4)")
    memories = ("numpy", "shared")
    add("--memory", nargs="+", choices=memories, default=memories)
    options = parser.parse_args()
    lengths = [*sizes(options.minbytes, options.maxbytes, options.stepfactor, None)]
    comm = Communicator(MPI.COMM_WORLD)
    report_first(comm, lengths, options.memory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
