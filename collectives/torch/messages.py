"""Messages between two ranks as torch's works."""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch.futures import Future

from collectives.torch import NAME
from collectives.torch.devices import behind, tensors_of
from collectives.torch.order import AnyWork, future_of
from collectives.torch.tensors import Joined

if TYPE_CHECKING:
    from collectives.torch.calls import Calls

profiler_enabled = torch.autograd._profiler_enabled
end_event = torch.autograd._record_function_with_args_exit


def event(what: str, tensors: Sequence[Any]) -> Any:
    """An event of torch's profiler that has begun, with the shapes of tensors."""
    return torch.autograd._record_function_with_args_enter(f"{NAME}:{what}", *tensors_of(tensors))


class MessageWork(AnyWork):
    """A message under way.

    Args:
        what: name in reports; all but a "send" is written back to its tensor.
        request: the request of MPI.
        flat: memory of the message, which is kept until it is complete.
        group: the group's calls; the message is in its ``under_way`` until it is complete, so that
            one that the program drops goes on, or until somebody waits for its error.
    """

    def __init__(self, what: str, request: MPI.Request, flat: Joined, group: "Calls") -> None:
        super().__init__()
        self._what, self._request, self._flat, self._group = what, request, flat, group
        self._receives = what != "send"
        self._write_back = behind(flat.write_back, flat.tensors)
        self._event = event(what, flat.tensors) if profiler_enabled() else None
        self._status = MPI.Status()
        self._guard = threading.Lock()
        self._is_complete = False
        self._future: Future[Any] | None = None
        group.under_way.add(self)

    def is_completed(self) -> bool:
        self._group.order.before_message()
        return self.test()

    def test(self) -> bool:
        """Whether the message is complete; runs no collective."""
        if self._guard.acquire(blocking=False):  # else another thread waits for it
            try:
                if not self._is_complete:
                    self._ask(self._request.Test)
            finally:
                self._guard.release()
        return self._is_complete

    def _end(self) -> None:
        self._group.order.before_message()
        with self._guard:
            if not self._is_complete:
                with self._group.watchdog.waiting(self._what, numbered=False):
                    self._ask(self._request.Wait)
        self._group.under_way.discard(self)

    def _ask(self, is_over: Callable[[MPI.Status], bool]) -> None:
        """Asks MPI, and keeps an error for who waits."""
        try:
            if not is_over(self._status):
                return
            if self._receives:
                self._check_size()
                self._write_back()
        except Exception as error:
            self._error = error
        if self._event is not None:
            end_event(self._event)
        self._is_complete = True
        if self._error is None:  # else somebody has to wait for it
            self._group.under_way.discard(self)

    def _check_size(self) -> None:
        expected, got = self._flat.whole.nbytes, self._status.Get_count(MPI.BYTE)
        if got != expected:
            raise ValueError(
                f"a message of {got} bytes came from rank {self._status.source} for a tensor of "
                f"{expected}: send and recv must have the same shape and dtype"
            )

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
            gate = future_of(self._flat.tensors)
            self._future = self._future_behind(gate)

            def complete() -> None:
                self._end()
                if self._error is not None:  # which who reads the future may drop
                    self._group.under_way.add(self)
                gate.set_result(None)

            if self._group.order.has_thread:
                threading.Thread(target=complete, daemon=True).start()
            else:
                complete()
        return self._future
