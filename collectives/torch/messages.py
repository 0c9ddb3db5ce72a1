"""Messages between two ranks as torch's works."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.futures import Future

from collectives.failure.watchdog import Watchdog
from collectives.torch import NAME
from collectives.torch.order import NO_TIMEOUT, Order
from collectives.torch.tensors import Joined

profiler_enabled = torch.autograd._profiler_enabled
end_event = torch.autograd._record_function_with_args_exit


def event(what: str, tensors: Sequence[Any]) -> Any:
    """An event of torch's profiler that has begun, with the shapes of tensors."""
    flat = [each for one in tensors for each in (one if isinstance(one, list) else [one])]
    return torch.autograd._record_function_with_args_enter(f"{NAME}:{what}", *flat)


class MessageWork(dist._Work):
    """A message under way.

    Args:
        what: name in reports; all but a "send" is written back to its tensor.
        request: the request of MPI.
        flat: memory of the message, which is kept until it is complete.
        under_way: messages of the group; this one is in it until it is complete, so that one
            that the program drops goes on.
        watchdog: sees who waits for the message.
        order: the group's collectives.
    """

    def __init__(
        self,
        what: str,
        request: MPI.Request,
        flat: Joined,
        under_way: "set[MessageWork]",
        watchdog: Watchdog,
        order: Order,
    ) -> None:
        super().__init__()
        self._watchdog, self._order, self._what = watchdog, order, what
        self._request, self._flat, self._receives = request, flat, what != "send"
        self._event = event(what, flat.tensors) if profiler_enabled() else None
        self._under_way = under_way
        self._status = MPI.Status()
        self._guard = threading.Lock()
        self._is_complete = False
        self._future: Future[Any] | None = None
        under_way.add(self)

    def is_completed(self) -> bool:
        self._order.before_message()
        return self.test()

    def test(self) -> bool:
        """Whether the message is complete; runs no collective."""
        if self._guard.acquire(blocking=False):  # else another thread waits for it
            try:
                if not self._is_complete and self._request.Test(self._status):
                    self._complete()
            finally:
                self._guard.release()
        return self._is_complete

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._order.before_message()
        with self._guard:
            if not self._is_complete:
                with self._watchdog.waiting(self._what, numbered=False):
                    self._request.Wait(self._status)
                self._complete()
        return True

    def _complete(self) -> None:
        if self._receives:
            self._flat.write_back()
        if self._event is not None:
            end_event(self._event)
        self._is_complete = True
        self._under_way.discard(self)

    def synchronize(self) -> None:
        self.wait()

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return list(self._flat.tensors) if self._receives else []

    def source_rank(self) -> int:
        self.wait()
        return self._status.source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """A future that a thread completes, as the message must not hold up the collectives.

        Where MPI allows no thread, the caller waits.
        """
        if self._future is None:
            future: Future[Any] = Future()
            self._future = future

            def complete() -> None:
                self.wait()
                future.set_result(self.result())

            if self._order.has_thread:
                threading.Thread(target=complete, daemon=True).start()
            else:
                complete()
        return self._future
