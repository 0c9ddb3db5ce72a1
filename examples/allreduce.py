"""An all-reduce: once, again and again by a plan, and while the rank does something else.

mpirun -n 4 python examples/allreduce.py
"""

import numpy as np
from mpi4py import MPI

from collectives import Communicator


def main() -> None:
    """Adds arrays of the ranks up in five ways, and says which algorithms ran."""
    with Communicator(MPI.COMM_WORLD) as comm:
        mine, total = np.empty(1 << 16, np.float32), np.empty(1 << 16, np.float32)
        wanted = comm.size * (comm.size + 1) // 2

        def expect_total(how: str) -> None:
            assert (total == wanted).all(), how
            if comm.rank == 0:
                plan = comm.last_plan
                assert plan is not None, "a collective has run"
                print(f"{how}: {plan.algorithm} ({plan.reason})")

        mine[:] = comm.rank + 1
        comm.Allreduce(mine, total)
        expect_total("auto")

        comm.Allreduce(mine, total, algorithm="ring:segments=2")
        expect_total("by name")

        plan = comm.Allreduce_init(mine, total, algorithm="butterfly")
        for _ in range(10):  # buffers are read once, here: a turn costs the messages alone
            total[:] = 0
            plan.Start()
            plan.Wait()
        expect_total("a plan, ten times")
        plan.Free()

        under_way = comm.Iallreduce(mine, total, algorithm="ring")
        while not under_way.Test():
            pass  # some work of one's own; each Test moves the all-reduce along
        expect_total("nonblocking")

        shared = comm.empty(1 << 16, np.float32)  # memory that the ranks of a node share
        shared[:] = mine
        comm.Allreduce(MPI.IN_PLACE, shared, algorithm="direct")
        total[:] = shared
        expect_total("loads and stores")


if __name__ == "__main__":
    main()
