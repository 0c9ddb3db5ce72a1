"""One thread at a time makes calls on a communicator."""

from functools import partial
from threading import RLock
from typing import NoReturn

from collectives.errors import CollectiveError


class Turn:
    """A block that one thread at a time may be in.

    Ranks pair calls by their order, and calls that threads make at once have none: they would give
    wrong numbers.  A plan that a thread waits for is in no such block.

    Attributes:
        take: begins it; whether no other thread is in it.
        give: ends it.
    """

    def __init__(self) -> None:
        lock = RLock()
        self.take, self.give = partial(lock.acquire, False), lock.release

    def refuse(self) -> NoReturn:
        """Raises :class:`CollectiveError` for a thread that comes while another one is in it."""
        raise CollectiveError(
            "another thread of this rank is in a call on this communicator, so that ranks may pair "
            "the wrong calls; give each thread a communicator of its own, or make the calls one "
            "after the other, in the same order on all ranks"
        )

    def __enter__(self) -> None:
        if not self.take():
            self.refuse()

    def __exit__(self, *_: object) -> None:
        self.give()
