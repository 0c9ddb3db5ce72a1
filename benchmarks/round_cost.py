"""Cost of one round, split into messages, reduction and Python; and of each form of a call.

mpirun -n 2 python -m benchmarks.round_cost
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter

import numpy as np
from mpi4py import MPI

from collectives.commands.arguments import positive
from collectives.communicator import Communicator

_REPEATS = 9


def report_round(comm: Communicator, turns: int) -> int:
    """Prints the table on rank 0; needs two ranks, each with a core."""
    if comm.size != 2:
        if comm.rank == 0:
            print("error: the cost of a round is measured on 2 ranks; use mpirun -n 2")
        return 2
    rows = [["bytes", "native", "round", "messages", "reduction", "empty calls"]]
    for nbytes in (8, 1024, 16384):
        rows.append([str(nbytes), *(f"{us:.2f}" for us in _parts(comm, nbytes, turns))])
    if comm.rank == 0:
        print("# microseconds, median of repeats, largest of the two ranks")
        print("# round: a bound butterfly all-reduce; messages: its Start and Wait calls alone;")
        print("# empty calls: as many calls of a Python function that does nothing")
        for row in rows:
            print("".join(cell.rjust(13) for cell in row))
        print("\n# the same all-reduce of 8 bytes, microseconds")
    calls = _calls(comm)
    times = [[_time(comm, call, turns) for call in calls.values()] for _ in range(_REPEATS)]
    for name, column in zip(calls, zip(*times)):
        if comm.rank == 0:
            print(f"{name:42}{1e6 * float(np.median(column)):8.2f}")
    return 0


def _calls(comm: Communicator) -> dict[str, Callable[[], object]]:
    """An all-reduce of two numbers, in every form in which a call can be made; ours is the
    butterfly."""
    send, recv = np.ones((2, 2), np.float32)
    shared = comm.empty(2, np.float32)
    shared[:] = 0
    call = partial(comm.Allreduce, algorithm="butterfly")
    return {
        "mpi4py's own": partial(MPI.Intracomm(comm).Allreduce, send, recv),
        "a call that auto leaves to it": partial(comm.Allreduce, send, recv),
        "the same with [array, type]": lambda: comm.Allreduce([send, MPI.FLOAT], [recv, MPI.FLOAT]),
        "a call with algorithm='native'": partial(call, send, recv, algorithm="native"),
        "a plan": comm.Allreduce_init(send, recv, algorithm="butterfly"),
        "a call with the same arrays": partial(call, send, recv),
        "a call with a new view each time": lambda: call(send[:], recv[:]),
        "a call with [array, type]": lambda: call([send, MPI.FLOAT], [recv, MPI.FLOAT]),
        "a plan in shared memory": comm.Allreduce_init(MPI.IN_PLACE, shared, algorithm="butterfly"),
        "a call with the same shared array": partial(call, MPI.IN_PLACE, shared),
    }


def _parts(comm: Communicator, nbytes: int, turns: int) -> list[float]:
    send, recv, other = (np.ones(nbytes // 4, np.float32) for _ in range(3))
    spec = [send, send.size, MPI.FLOAT], [recv, recv.size, MPI.FLOAT]
    native = comm.Allreduce_init(*spec, algorithm="native")
    plan = comm.Allreduce_init(*spec, algorithm="butterfly")
    peer = 1 - comm.rank
    channel = MPI.Intracomm(comm).Dup()
    requests = [
        channel.Recv_init([recv, nbytes, MPI.BYTE], peer),
        channel.Send_init([send, nbytes, MPI.BYTE], peer),
    ]
    calls: list[Callable[[], object]] = [*(r.Start for r in requests), *(r.Wait for r in requests)]

    def exchange() -> None:
        for call in calls:
            call()

    def nothing() -> None:
        pass

    def empty() -> None:
        for call in [nothing] * (len(calls) + 1):
            call()

    add = partial(np.add, send, other, recv)
    measured: list[Callable[[], object]] = [native, plan, exchange, add, empty]
    times = [[_time(comm, call, turns) for call in measured] for _ in range(_REPEATS)]
    for request in requests:
        request.Free()
    channel.Free()
    plan.Free()
    return [1e6 * float(np.median(column)) for column in zip(*times)]


def _time(comm: Communicator, call: Callable[[], object], turns: int) -> float:
    comm.Barrier()
    begun = perf_counter()
    for _ in range(turns):
        call()
    return comm.allreduce((perf_counter() - begun) / turns, op=MPI.MAX)


def main() -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.round_cost", description=__doc__)
    parser.add_argument("--calls", type=positive, default=5000, help="calls in a repeat (5000)")
    options = parser.parse_args()
    return report_round(Communicator(MPI.COMM_WORLD), options.calls)


if __name__ == "__main__":
    sys.exit(main())
