"""The GPUs of the ranks: what all of them must have, or none."""

from mpi4py import MPI

from collectives.errors import CollectiveError


def all_or_none(comm: MPI.Intracomm, trouble: str) -> None:
    """Raises :class:`CollectiveError` on all ranks where one is in ``trouble``.  Collective."""
    for rank, told in enumerate(comm.allgather(trouble)):
        if told:
            raise CollectiveError(f"rank {rank}: {told}")
