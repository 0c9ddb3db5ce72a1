"""A communication hook that raises on some ranks: all hear of it, and nobody waits for its sums."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpi4py import MPI

from mpitrain.adapters.torch.rendezvous import Final, in_words, largest

#: Of the messages that end the waiting for sums.
_TAG = 1


class HookFailed(RuntimeError):
    """A communication hook of another rank has raised an error."""


class HookErrors:
    """What hooks have raised on this rank, and how the others hear of it.

    Attributes:
        own: the first error of this rank's hooks.
    """

    def __init__(self, words: MPI.Intracomm) -> None:
        """``words``: where the ranks meet, on which nobody else sends messages."""
        self._words = words
        self.own: Exception | None = None

    @property
    def fault(self) -> str:
        """For the ranks' next meeting; what hooks have started does not end."""
        if self.own is None:
            return ""
        return Final(f"its communication hook has failed: {type(self.own).__name__}: {self.own}")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """An error in it is kept until the ranks meet, and those that wait hear of it."""
        try:
            yield
        except HookFailed:
            pass  # this rank has waited for one that failed
        except Exception as error:
            if self.own is None:
                self.own = error
                for rank in self._others():
                    self._words.Send([None, 0, MPI.BYTE], rank, _TAG)

    def expect_none(self) -> None:
        """Called while a rank waits for what others take part in.

        Raises:
            HookFailed: they do not any more.
        """
        if self._words.Iprobe(MPI.ANY_SOURCE, _TAG):
            raise HookFailed

    def agree(self, idle: Callable[[], None]) -> bool:
        """Whether a rank has had an error; collective.

        Args:
            idle: called while this rank waits for the others.
        """
        return bool(largest(self._words, [self.own is not None], idle)[0])

    def told(self) -> str:
        """Which ranks' hooks have failed, and how; collective, after one has."""
        faults = self._words.allgather(self.fault)
        for rank in self._others():
            if faults[rank]:
                self._words.Recv([None, 0, MPI.BYTE], rank, _TAG)
        return f"DataParallel: {in_words(faults)}"

    def _others(self) -> list[int]:
        return [rank for rank in range(self._words.size) if rank != self._words.rank]
