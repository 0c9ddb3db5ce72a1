"""Differences between the clocks of ranks."""

from collections.abc import Callable, Iterable

from mpi4py import MPI


def ahead(
    comm: MPI.Intracomm, ranks: Iterable[int], trips: int, clock: Callable[[], float]
) -> float:
    """Seconds that this rank's clock is ahead of rank 0's; collective.

    The fastest round trip bounds the error by half of itself (Cristian 1989).

    Args:
        comm: the ranks.
        ranks: ranks that compare their clocks with rank 0's; the others return 0.
        trips: round trips of each.
        clock: the clock.
    """
    best = (float("inf"), 0.0)
    for rank in ranks:
        for _ in range(trips):
            if comm.rank == 0:
                comm.recv(source=rank)
                comm.send(clock(), rank)
            elif comm.rank == rank:
                there = clock()
                comm.send(None, 0)
                theirs = comm.recv(source=0)
                back = clock()
                best = min(best, (back - there, (there + back) / 2 - theirs))
    return best[1]
