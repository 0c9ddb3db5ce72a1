"""Signals as bytes in a socket, which a thread reads while the main one is inside MPI."""

import os
import signal
import threading
from dataclasses import dataclass
from socket import socket
from typing import Any, Self


@dataclass(frozen=True)
class Wakeup:
    """The descriptor that Python writes the number of each signal to.

    Only the main thread can name one to Python.  Another thread has the named one lead elsewhere.

    Attributes:
        previous: handler of ``SIGUSR2`` before.
        descriptor: its number.
    """

    previous: Any
    descriptor: int

    @classmethod
    def to(cls, end: socket) -> Self | None:
        """Has signals written to ``end``; ``None`` where Python writes them elsewhere already, or
        this is not the main thread.

        Python's own handlers run between byte codes, so not while a rank is inside MPI.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        descriptor = os.dup(end.fileno())
        other = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        if other != -1:
            if not os.path.samestat(os.fstat(other), os.stat(os.devnull)):
                signal.set_wakeup_fd(other)  # an event loop of the program uses it, or a watchdog
                os.close(descriptor)
                return None
            os.close(other)  # another thread has left it to nobody
        previous = signal.getsignal(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, previous if callable(previous) else _nothing)
        return cls(previous, descriptor)

    def lead(self, end: socket) -> None:
        """Has signals written to another socket."""
        os.dup2(end.fileno(), self.descriptor)

    def close(self) -> None:
        """Has signals written nowhere."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self.previous)
            signal.set_wakeup_fd(-1)
            os.close(self.descriptor)
            return
        # Python goes on to write to this number, so no other file may get it.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.descriptor)


def _nothing(*_: object) -> None:
    """Handler without effect, by which Python writes to the file descriptor."""
