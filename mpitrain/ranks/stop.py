"""Requests to stop: a signal or the end of the allotted time on any rank stops all ranks."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from time import time
from types import FrameType

from mpi4py import MPI

from mpitrain.config import ConfigError
from mpitrain.ranks.together import together

#: EX_TEMPFAIL: run it again, and it goes on.
GO_ON = 75


class Stopped(SystemExit):
    """Training was asked to stop and has written a checkpoint.

    A program that does not catch it ends with exit status 75, without a traceback.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = GO_ON


class StopFlag:
    """Whether this rank has been asked to stop; ranks agree on it at the end of a step.

    Attributes:
        reason: why, or empty.
    """

    def __init__(self, deadline: float | None = None, beside: "StopFlag | None" = None) -> None:
        """``deadline``: seconds since the epoch; ``beside``: a flag that raises this one, too."""
        self.reason = ""
        self._deadline = deadline
        self._beside = beside

    def raised(self) -> bool:
        """Whether to stop."""
        if not self.reason and self._beside is not None and self._beside.raised():
            self.reason = self._beside.reason
        if not self.reason and self._deadline is not None and time() >= self._deadline:
            self.reason = "the time limit is near"
        return bool(self.reason)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Notes a signal."""
        self.reason = f"signal {signal.Signals(number).name}"


@contextmanager
def stop_flag(
    grace_s: float,
    comm: MPI.Intracomm = MPI.COMM_SELF,
    environment: Mapping[str, str] = os.environ,
    beside: StopFlag | None = None,
) -> Iterator[StopFlag]:
    """Flag that signals raise, and ``SLURM_JOB_END_TIME``, ``grace_s`` before it: at most half of
    the time since ``SLURM_JOB_START_TIME``.

    The signals are SIGTERM, SIGUSR1 and the first SIGINT, unless the program handles that one; rank
    0 says at once that it has heard one, as a launcher may kill it before the end of the step.  A
    raised flag ``beside`` raises it, too.  Only the main thread handles signals; in other threads
    they stay with the program.  Collective to enter; ConfigError on all ranks: SLURM's time is no
    number.
    """
    flag = StopFlag(together(comm, lambda: _deadline(grace_s, environment), ConfigError), beside)
    speaks = comm.rank == 0

    def hear(number: int, frame: FrameType | None) -> None:
        if speaks and not flag.reason:
            again = " (at a second one, at once)" if number == signal.SIGINT else ""
            with suppress(OSError):  # nobody may read stderr any more
                _tell(
                    f"mpitrain: {signal.Signals(number).name}: the ranks save this step and stop"
                    f"{again}; if they are killed before, a resumed run goes on from the newest "
                    "checkpoint\n"
                )
        flag.hear(number, frame)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # a second one interrupts

    heard = list(_HEARD) if threading.current_thread() is threading.main_thread() else []
    if heard and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        heard.append(signal.SIGINT)
    former = {number: signal.signal(number, hear) for number in heard}
    try:
        yield flag
    finally:
        for number, handler in former.items():
            # Python does not know a handler of a C library, and cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _tell(text: str) -> None:
    """Write to the terminal: at Ctrl-C, Open MPI's launcher forwards no output, and kills the ranks
    after 0.25 s.  To stderr where there is none.  ``print`` may be in the middle of a line."""
    try:
        terminal = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        os.write(2, text.encode())
        return
    os.write(terminal, text.encode())
    os.close(terminal)


def _deadline(grace_s: float, environment: Mapping[str, str]) -> float | None:
    """The end of the job less ``grace_s``, of which a short job gives no more than its half."""
    end, begin = (environment.get(f"SLURM_JOB_{name}_TIME", "") for name in ("END", "START"))
    if not end:
        return None
    if not (end.isascii() and end.isdigit()):
        raise ConfigError(
            f"SLURM_JOB_END_TIME = {end!r} is no number of seconds since 1970; unset it if this "
            "job has no time limit"
        )
    if begin.isascii() and begin.isdigit():
        grace_s = min(grace_s, (float(end) - float(begin)) / 2)
    return float(end) - grace_s


_HEARD = (signal.SIGTERM, signal.SIGUSR1)
