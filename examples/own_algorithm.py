"""An all-reduce of one's own: half of the buffer goes round a ring one way, half the other way.

It is proved, drawn and simulated without MPI, and run on as many ranks as there are:

    python -m collectives verify examples/own_algorithm.py:both_ways -n 1-17
    python -m collectives draw examples/own_algorithm.py:both_ways -n 4
    python -m collectives simulate -n 8 --algorithm ring,examples/own_algorithm.py:both_ways
    mpirun -n 4 python -m collectives bench allreduce --algorithm examples/own_algorithm.py
    mpirun -n 4 python examples/own_algorithm.py

docs/invent.md goes through it step by step.
"""

from collections.abc import Iterator

import numpy as np

from collectives import Algorithm
from collectives.schedule import Recv, RecvReduce, Round, Send, Step, recvbuf, sendbuf


def rounds(rank: int, size: int) -> Iterator[Round]:
    """Chunks 0 to p-1 travel to the right, chunks p to 2p-1 to the left.

    Cost: 2(p-1) rounds, 2(p-1)/p of the buffer sent by each rank, half of it each way.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    ways = (right, left, 1, 0), (left, right, -1, size)  # to, from, direction, first chunk
    for step in range(2 * (size - 1)):
        steps: list[Step] = []
        for to, source, way, first in ways:
            leaving = first + (rank - way * (step + 1)) % size
            arriving = first + (rank - way * (step + 2)) % size
            steps.append(Send(to, (sendbuf if step == 0 else recvbuf)[leaving]))
            if step < size - 1:  # partial sums grow as they travel
                steps.append(RecvReduce(source, recvbuf[arriving], sendbuf[arriving]))
            else:  # and go round once more when they are complete
                steps.append(Recv(source, recvbuf[arriving]))
        yield tuple(steps)


both_ways = Algorithm(
    "allreduce",
    "both_ways",
    rounds,
    "half of the buffer round the ring one way, half the other way",
    chunks=lambda size: 2 * size,
    uniform=True,
)


def main() -> None:
    """Runs it with messages, in shared memory, and as a plan."""
    from mpi4py import MPI  # here, as whoever only proves the algorithm needs no MPI

    from collectives import Communicator

    with Communicator(MPI.COMM_WORLD) as comm:
        wanted = comm.size * (comm.size + 1) // 2
        for memory, numbers in (("messages", np.empty(10_000)), ("shared", comm.empty(10_000))):
            numbers[:] = comm.rank + 1
            comm.Allreduce(MPI.IN_PLACE, numbers, algorithm=both_ways)
            assert (numbers == wanted).all(), memory

            plan = comm.Allreduce_init(MPI.IN_PLACE, numbers, algorithm="both_ways:segments=2")
            for _ in range(3):
                numbers[:] = comm.rank + 1
                plan.Start()
                plan.Wait()
                assert (numbers == wanted).all(), memory
            if comm.rank == 0:
                print(f"{memory}: {plan.algorithm} on {comm.size} ranks is right")
            plan.Free()


if __name__ == "__main__":
    main()
