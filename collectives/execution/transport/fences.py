"""Full memory fences, for processors that are not x86-64."""

from mpi4py import MPI


class Fences:
    """Call it for a fence.  Making and closing it are collective.

    Python has none of its own; MPI's ``Win_sync`` on a window of shared memory is one: "the
    synchronization of the private and public copies" of what is in it (MPI 4.1, 12.7), which the
    libraries do by a full barrier of the processor.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._window = MPI.Win.Allocate_shared(8, 1, comm=comm)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._sync = self._window.Sync

    def __call__(self) -> None:
        self._sync()

    def close(self) -> None:
        """Frees the window.  Collective."""
        self._window.Unlock_all()
        self._window.Free()
