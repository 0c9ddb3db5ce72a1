"""The order of a group's collectives, and the thread that carries them out in the background."""

import collections
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.futures import Future

from collectives.failure.history import What
from collectives.torch import NAME
from collectives.torch.devices import devices_of, tensors_of

_c10d: Any = torch._C._distributed_c10d
#: Whether wait_tensor must find calls in flight; a torch without the switch has no such calls.
_is_in_graph = getattr(_c10d, "_allow_inflight_collective_as_graph_input", lambda: False)
NO_TIMEOUT = timedelta(milliseconds=-1)
#: Seconds after which a thread that holds the interpreter lets another one have it: with Python's
#: own 5 ms, 1 MiB in the background takes 50 ms beside a busy program, and 15 ms with this.
_SWITCH_SECONDS = 1e-4
#: Seconds between two looks for calls that nobody waits for, and looks before the thread sleeps.
_LOOK_SECONDS, _LOOKS = 1e-4, 10
#: Seconds between two looks of a caller at whether another thread has run its call.
_TURN_SECONDS = 5e-4


def future_of(value: Any) -> Future[Any]:
    """A future for these tensors, which those that wait for it may use on any stream."""
    return Future(devices=[*devices_of(value)])


class AnyWork(dist._Work):
    """The methods that follow from how a work ends, from whether it has, and from its error."""

    _error: BaseException | None = None

    def _end(self) -> None:
        """Returns when the work has ended."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._end()
        return self._is_right()

    def _is_right(self) -> bool:
        if self._error is not None:
            raise self._error
        return True

    def _future_behind(self, gate: Future[Any]) -> Future[Any]:
        """The future of the result, or of the error, once the gate is open."""
        # DDP's reducer would take an error of Future.set_exception for the result.
        return gate.then(lambda _: self._is_right() and self.result())

    def synchronize(self) -> None:
        self.wait()

    def exception(self) -> BaseException | None:
        return self._error

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None


class DoneWork(AnyWork):
    """A blocking call, which has put its result into the caller's tensors."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> Any:
        raise RuntimeError("a blocking call has its result in its tensors; pass async_op=True")

    get_future = result


class CollectiveWork(AnyWork):
    """A collective in the order; to wait for it is to run what comes before it, and itself.

    Args:
        order: the order.
        value: tensors of the result.
        inputs: tensors, or their storages, that live as long as the call.
        call, given: the function that communicates, and what it gets.
    """

    def __init__(
        self, order: "Order", value: Any, inputs: Any, call: Callable[..., None], *given: Any
    ) -> None:
        super().__init__()
        self._order, self._value, self._inputs = order, value, inputs
        self._call, self._given = call, given
        self.is_done = False
        self._gate: Future[Any] | None = None
        # wait_tensor must find a call in flight whose tensors torch.compile's graphs may read.
        self._registered = [*tensors_of(value)] if _is_in_graph() else []
        for tensor in self._registered:
            order.unread.add(self)  # as C++ keeps the half of it in C++ alone
            _c10d._register_work(tensor, self)

    def run(self) -> None:
        try:
            self._call(*self._given)
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):  # as Ctrl-C: the caller's, who may catch it
                raise
            self._order.unread.add(self)  # who only reads its future may drop the error
        finally:
            del self._call, self._given, self._inputs  # with the tensors that they hold
            with self._order.futures:
                self.is_done = True
                gate = self._gate
            if gate is not None:
                gate.set_result(None)

    def _end(self) -> None:
        if not self.is_done:
            self._order.help(self)
        self._order.unread.discard(self)
        registered, self._registered = self._registered, []
        for tensor in registered:  # which takes it off torch's list, and calls this again
            torch.ops._c10d_functional.wait_tensor(tensor)

    def is_completed(self) -> bool:
        """Whether the call has ended; without a thread, who asks runs it."""
        if not self._order.has_thread:
            self._order.help(self)
        return self.is_done

    def result(self) -> Any:
        return self._value

    def get_future(self) -> Future[Any]:
        self.is_completed()
        with self._order.futures:
            if self._gate is None:
                self._gate = future_of(self._value)
                self._future = self._future_behind(self._gate)
                if self.is_done:
                    self._gate.set_result(None)
        if not self.is_done:
            self._order.wake()  # who waits for a future cannot help
        return self._future


class Order:
    """The collectives of one group, in the order in which the program called them.

    Whoever holds the lock runs the first one: the group's thread, or a caller that waits.
    Callbacks of a future run with the lock held, and collectives that they call run at once: so
    these have the same place in the order on all ranks, whoever runs them.

    Where MPI gives less than ``MPI_THREAD_MULTIPLE`` there is no thread: a call runs when the
    program waits for it, asks for it, or makes a later call that blocks.

    Attributes:
        has_thread: whether a thread of the group's may run calls.
        calls: the calls that wait for their turn.
        runs: held by whoever runs a call; again where a callback calls.
        futures: guards the futures of the calls.
        unread: calls that have failed, or that C++ waits for, and nobody has waited for yet.
    """

    def __init__(self) -> None:
        self.has_thread = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.calls: collections.deque[CollectiveWork] = collections.deque()
        self.runs = threading.RLock()
        self.futures = threading.Lock()
        self.unread: set[CollectiveWork] = set()
        self._is_running = False
        self._thread: threading.Thread | None = None
        self._is_asleep = False
        self._bell = threading.Event()
        self._ends = False

    def now(
        self, record: Callable[..., None], what: What, call: Callable[..., None], given: Any = ()
    ) -> None:
        """Runs a call after those that came before, and records it."""
        with self.runs:
            if self._is_running:  # a callback of this thread's calls
                record(what, call, given)
                return
            while self.calls:
                self._run_first()
            self._is_running = True
            try:
                record(what, call, given)
            finally:
                self._is_running = False

    def later(self, work: CollectiveWork) -> None:
        """Lets the group's thread run a call, unless somebody waits for it earlier."""
        if self._is_callback():
            work.run()
            return
        self.calls.append(work)
        if not self.has_thread:
            return
        if self._thread is None:
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
            self._thread = threading.Thread(target=self._serve, name=NAME, daemon=True)
            self._thread.start()
        elif self._is_asleep:
            self.wake()

    def help(self, work: CollectiveWork) -> None:
        """Runs calls until this one has ended."""
        while not work.is_done:
            # Whoever holds the lock may have run this call and be in the next one, which may need
            # what the caller does next.
            if self.runs.acquire(timeout=_TURN_SECONDS):
                try:
                    if not work.is_done and self.calls:
                        self._run_first()
                finally:
                    self.runs.release()

    def catch_up(self) -> None:
        """Runs what is left."""
        while self.calls:
            with self.runs:
                if self.calls:
                    self._run_first()

    def before_message(self) -> None:
        """Runs what a thread would run while the caller waits for a message."""
        if not self.has_thread and not self._is_running:
            self.catch_up()

    def close(self) -> None:
        """Runs what is left, and ends the thread; raises an error that nobody knows of."""
        self.catch_up()
        if self._thread is not None:
            self._ends = True
            self.wake()
            self._thread.join()
            self._thread = None
        for work in list(self.unread):
            work.wait()

    def wake(self) -> None:
        """Lets the thread run what there is, now."""
        self._is_asleep = False
        self._bell.set()

    def _is_callback(self) -> bool:
        """Whether this thread runs a call, so that a callback of it asks."""
        if not self._is_running or not self.runs.acquire(blocking=False):
            return False
        try:
            return self._is_running  # else another thread has just ended its call
        finally:
            self.runs.release()

    def _run_first(self) -> None:
        """Runs the first call and the callbacks of its future, with the lock held."""
        before, self._is_running = self._is_running, True
        try:
            self.calls.popleft().run()
        finally:
            self._is_running = before

    @torch.no_grad()
    def _serve(self) -> None:
        """Runs calls; looks for more for a while before it sleeps, as to wake it takes longer than
        a small call that its caller waits for."""
        looks = 0
        while not self._ends:
            if self.calls:
                self.catch_up()
                looks = 0
            elif looks < _LOOKS:
                looks += 1
                self._bell.wait(_LOOK_SECONDS)
            else:
                self._is_asleep = True
                if not self.calls and not self._ends:  # else one has come meanwhile
                    self._bell.wait()
                self._is_asleep = False
                looks = 0
            self._bell.clear()
