"""One thread at a time makes calls on a communicator."""

from threading import RLock

from collectives.errors import CollectiveError


class Turn:
    """A block that one thread at a time may be in.

    Ranks pair calls by their order, and calls that threads make at once have none: they would give
    wrong numbers.  A plan that a thread waits for is in no such block.
    """

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        """Raises :class:`CollectiveError` while another thread is in it."""
        if not self._lock.acquire(blocking=False):
            raise CollectiveError(
                "another thread of this rank is in a call on this communicator, so that ranks may "
                "pair the wrong calls; give each thread a communicator of its own, or make the "
                "calls one after the other, in the same order on all ranks"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()
