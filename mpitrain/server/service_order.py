"""A server's order of service."""

from collections.abc import Collection


class RoundRobin:
    """Each worker in turn: a worker that was served comes last.

    MPI promises no fairness of receives from any source: one worker might never be heard.  Here a
    message waits for at most one of each other worker.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._last = workers - 1

    def begin(self) -> None:
        """Begin a window, from one meeting of all ranks to the next."""
        self._last = self._workers - 1

    def next(self, ready: Collection[int]) -> int | None:
        """The worker to serve, among those whose messages can be; None: wait for another one."""
        for distance in range(1, self._workers + 1):
            worker = (self._last + distance) % self._workers
            if worker in ready:
                self._last = worker
                return worker
        return None
