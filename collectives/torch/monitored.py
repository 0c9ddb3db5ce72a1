"""``torch.distributed.monitored_barrier``: a barrier with a timeout, which names missing ranks."""

from time import monotonic, sleep

from mpi4py import MPI

from collectives.communicator import Communicator

#: Seconds between two looks at the messages, which leave the core to a rank that is behind.
_LOOK_S = 1e-4


def monitored_barrier(comm: Communicator, number: int, seconds: float, names_all: bool) -> None:
    """Waits until all ranks are here; rank 0 hears from the others, and then lets them go.

    A rank that comes after the timeout raises as well, and the next barrier is whole again.

    Args:
        number: counts the communicator's barriers, so that the message of a rank that came too
            late to an earlier one is told from this one's.
        seconds: timeout.
        names_all: whether rank 0 names all ranks that are missing, in the place of the first.

    Raises:
        RuntimeError: a rank is missing; on rank 0 with its number.
    """
    end, tag = monotonic() + seconds, int(comm.Get_attr(MPI.TAG_UB) or 0)
    others = range(1, comm.size) if comm.rank == 0 else [0]
    if comm.rank:
        comm.send((number, True), 0, tag)
    said: dict[int, bool] = {}
    while True:
        for rank in others:
            while rank not in said and comm.iprobe(rank, tag):
                of, whether = comm.recv(source=rank, tag=tag)
                if of == number:
                    said[rank] = whether
        if len(said) == len(others) or monotonic() > end:
            break
        sleep(_LOOK_S)
    if comm.rank:
        if said != {0: True}:
            raise RuntimeError(
                f"Rank {comm.rank} successfully reached monitoredBarrier, but received errors "
                "while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank."
            )
        return
    missing = [rank for rank in others if rank not in said]
    for rank in said:
        comm.send((number, not missing), rank, tag)
    spent = f"{1000 * seconds:g} ms"
    if missing and seconds <= 0:
        raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {spent}.")
    if missing:
        who = ", ".join(map(str, missing if names_all else missing[:1]))
        ranks = "Ranks" if names_all and len(missing) > 1 else "Rank"
        raise RuntimeError(f"[Rank 0]: {ranks} {who} failed to pass monitoredBarrier in {spent}")
