"""The order of a group's collectives, and the thread that carries them out in the background."""

import collections
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

NO_TIMEOUT = timedelta(milliseconds=-1)
#: Seconds after which a thread that holds the interpreter lets another one have it: with Python's
#: own 5 ms, 1 MiB in the background takes 50 ms beside a busy program, and 15 ms with this.
_SWITCH_SECONDS = 1e-4


class DoneWork(dist._Work):
    """A call that is complete when it is returned."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self._value

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._value)
        return future


class CollectiveWork(dist._Work):
    """A collective in the order; to wait for it is to run what comes before it, and itself."""

    def __init__(self, order: "Order", call: Callable[[], None], value: Any) -> None:
        super().__init__()
        self._order, self._call, self._value = order, call, value
        self._guard = threading.Lock()
        self._is_done = threading.Event()
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self._error = error
        del self._call  # with the tensors that it holds
        with self._guard:
            self._is_done.set()
            future = self._future
        if future is not None:
            self._tell(future)

    def _tell(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._value)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not self._is_done.is_set():
            self._order.help(self._is_done)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._is_done.is_set()

    def is_success(self) -> bool:
        return self._is_done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        return self._value

    def get_future(self) -> Future[Any]:
        with self._guard:
            is_new, is_done = self._future is None, self._is_done.is_set()
            if self._future is None:
                self._future = Future()
        if is_new and is_done:
            self._tell(self._future)
        return self._future


class JointWork(dist._Work):
    """Several works as one, which a coalescing block returns."""

    def __init__(self, works: list[dist._Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        for work in self._works:
            work.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self._works])

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception())), None)

    def result(self) -> list[Any]:
        return [work.result() for work in self._works]

    def get_future(self) -> Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])


class Order:
    """The collectives of one group, in the order in which the program called them.

    Whoever holds the lock runs the first one: the group's thread, or a caller that waits.
    Callbacks of a future run with the lock held, and collectives that they call run at once: so
    these have the same place in the order on all ranks, whoever runs them.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: collections.deque[CollectiveWork] = collections.deque()
        self._runs = threading.Lock()
        self._runner: int | None = None
        self._comes = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._ends = False

    def now(self, call: Callable[[], None], value: Any) -> dist._Work:
        """Runs a call after those that came before."""
        if self._runner == threading.get_ident():
            call()
            return DoneWork(value)
        while True:
            with self._runs:
                if not self._calls:
                    self._run(call)
                    return DoneWork(value)
                self._run(self._calls.popleft().run)

    def later(self, call: Callable[[], None], value: Any) -> dist._Work:
        """Lets the group's thread run a call, unless somebody waits for it earlier."""
        work = CollectiveWork(self, call, value)
        if self._runner == threading.get_ident():
            work.run()
            return work
        self._calls.append(work)
        if self._thread is None:
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._comes.release()
        return work

    def help(self, until: threading.Event) -> None:
        """Runs calls until one of them has ended."""
        if self._runner == threading.get_ident():  # a callback, which holds the lock, waits
            while not until.is_set():
                self._calls.popleft().run()
            return
        while not until.is_set():
            with self._runs:
                if not until.is_set() and self._calls:
                    self._run(self._calls.popleft().run)

    def close(self) -> None:
        """Runs what is left, and ends the thread."""
        while self._calls:
            with self._runs:
                if self._calls:
                    self._run(self._calls.popleft().run)
        if self._thread is not None:
            self._ends = True
            self._comes.release()
            self._thread.join()
            self._thread = None

    def _run(self, call: Callable[[], None]) -> None:
        self._runner = threading.get_ident()
        try:
            call()
        finally:
            self._runner = None

    def _serve(self) -> None:
        while True:
            self._comes.acquire()
            if self._ends:
                return
            with self._runs, torch.no_grad():
                if self._calls:
                    self._run(self._calls.popleft().run)
