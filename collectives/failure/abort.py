"""Guards for a rank that dies alone, and a launcher that dies first."""

import io
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn

from mpi4py import MPI

from collectives.environment import switch
from collectives.launchers import PROCESSES

#: What a launcher has not forwarded when it hears of an abort may be lost: MPICH's sometimes loses
#: the traceback.
_FORWARDING_S = 0.2
#: How long ranks leave it to one of them to write what all have raised, and to end them.
_FIRST_S = 3
#: How long ``Abort`` may take; it is done in milliseconds, or never.
_ABORT_S = 5
#: A launcher that cannot reach another node waits for TCP to give up: 15 minutes.
_LAUNCHER_S = 30
#: How often a rank looks whether it still has the parent that it began with.
_PARENT_S = 1.0
#: The exit status of one that has not: 128 + SIGHUP.
ORPHANED = 129


@contextmanager
def abort_on_exception(comm: MPI.Comm) -> Iterator[None]:
    """Ends the whole job when this rank fails, its traceback first.

    Without it the other ranks wait for this one for ever.  ``SystemExit`` with status 0 or none
    passes; any other ends the job with that status.  A rank whose parent dies ends too: MPICH's
    ranks otherwise go on for ever when the daemon of their node is killed, and ``mpiexec`` waits.
    """
    over, own = threading.Event(), os.getpid()
    if comm.size > 1:
        threading.Thread(
            target=_end_with, args=(os.getppid(), comm.rank, over), daemon=True
        ).start()
    try:
        yield
    except BaseException as error:
        if os.getpid() != own:
            raise  # a child that a program has forked is no rank
        if comm.size == 1 or (isinstance(error, SystemExit) and error.code in (None, 0)):
            raise
        end_job(comm, error)
    finally:
        over.set()


def end_job(comm: MPI.Comm, error: BaseException, why: str = "") -> NoReturn:
    """Ends all ranks for an error of this one, its traceback first.

    The exit status is that of a ``SystemExit`` where it has one but 0, else 1.

    Args:
        comm: the ranks.
        error: its text alone is written where it is a ``SystemExit`` and there is no ``why``.
        why: a sentence for people, written behind the traceback.
    """
    status = error.code if isinstance(error, SystemExit) else None
    if isinstance(error, SystemExit) and not why:
        if not isinstance(status, int):
            print(status, file=sys.stderr)
    else:
        if why:
            error.add_note(why)
        _say_where(comm, error)
        traceback.print_exception(error)
        if calls := getattr(comm, "report_calls", str)():
            print(calls, file=sys.stderr)
    _abort(comm, status if isinstance(status, int) and status % 256 else 1)


def note_shared(comm: MPI.Comm, error: BaseException, teller: int = 0) -> None:
    """Notes that all of these ranks have raised this error, so that one writes it for all."""
    if comm.size == MPI.COMM_WORLD.size and not hasattr(error, "_teller"):
        abort_when_uncaught()
        with suppress(AttributeError, TypeError):  # a class may take no attributes
            error._teller = teller  # type: ignore[attr-defined]


class _AbortingHook:
    """``sys.excepthook`` that ends the job after the ``previous`` one has written the traceback."""

    def __init__(self, previous: Callable[..., object]) -> None:
        self.previous = previous

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        comm = MPI.COMM_WORLD
        alone = MPI.Is_finalized() or comm.size == 1
        if not alone:
            _say_where(comm, error)
        self.previous(kind, error, trace)
        if not (alone or hasattr(sys, "ps1")):  # at a prompt, the exception ends nothing
            _abort(comm, 1)


def abort_when_uncaught(environment: Mapping[str, str] = os.environ) -> None:
    """From now on, an exception that nobody catches on this rank ends the whole job.

    Its traceback comes first, as Python writes it.  Does nothing if ``COLLECTIVES_ABORT`` is off,
    or a second time.
    """
    if aborts(environment) and not isinstance(sys.excepthook, _AbortingHook):
        sys.excepthook = _AbortingHook(sys.excepthook)


def aborts(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether an error of one rank is to end the job."""
    return "COLLECTIVES_ABORT" not in environment or switch("COLLECTIVES_ABORT", environment)


def _say_where(comm: MPI.Comm, error: BaseException) -> None:
    """Whose error is written next; what all ranks have raised, one of them writes."""
    where = f"rank {comm.rank} of {comm.size} on {socket.gethostname()}"
    teller = getattr(error, "_teller", None)
    if teller == comm.rank:
        where = f"all {comm.size} ranks"
    elif teller is not None:
        time.sleep(_FIRST_S)  # longer only where that one has caught it
    print(f"[{where}] ", file=sys.stderr, end="", flush=True)


def _end_with(parent: int, rank: int, over: threading.Event) -> None:
    """Ends this process soon after its parent, unless it is ``over`` before."""
    while not over.wait(_PARENT_S):
        if os.getppid() != parent:
            with suppress(OSError):  # the launcher may have been who reads it
                print(
                    f"[rank {rank} on {socket.gethostname()}] process {parent}, the launcher's on "
                    "this node, is gone, and this rank ends with it",
                    file=sys.stderr,
                    flush=True,
                )
            os._exit(ORPHANED)


def expect_end(own: float = _ABORT_S, launcher: float = _LAUNCHER_S) -> None:
    """The job is about to be aborted: kill this process, and what launched it, if they do not end.

    Where another node cannot be reached, MPICH's ``Abort`` may never return, and no thread of
    Python runs while it is called; Open MPI's ``mpirun`` waits for that node's daemon.

    Args:
        own: seconds until this process is killed.
        launcher: seconds until the launcher's processes on this node are.
    """
    number = os.getpid()
    kills = [
        f"sleep {own}",
        _kill(number, _stat(number)),
        f"sleep {launcher - own}",
        *(_kill(*found) for found in _launchers()),
    ]
    subprocess.Popen(
        ["sh", "-c", "; ".join(kills)],
        start_new_session=True,  # it outlives this process
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


class _Stat(NamedTuple):
    """Of ``/proc/PID/stat``."""

    name: str
    parent: int
    began: str


def _stat(number: int) -> _Stat:
    # The name may hold spaces and parentheses.
    before, _, rest = Path(f"/proc/{number}/stat").read_text().rpartition(")")
    fields = rest.split()
    return _Stat(before.partition("(")[2], int(fields[1]), fields[19])


def _kill(number: int, stat: _Stat) -> str:
    """In the words of a shell; by then the number may be another process's."""
    began = f'sed "s/.*) //" /proc/{number}/stat 2>/dev/null | cut -d" " -f20'
    return f'[ "$({began})" = {stat.began} ] && kill -KILL {number}'


def _launchers() -> Iterator[tuple[int, _Stat]]:
    """The parent and, if it runs on this node, the launcher above it."""
    parent = number = os.getppid()
    with suppress(OSError):  # one has ended
        while number > 1:
            stat = _stat(number)
            launches = stat.name.startswith(PROCESSES)
            if launches or number == parent:
                yield number, stat
            if launches:
                return
            number = stat.parent


def _abort(comm: MPI.Comm, status: int) -> NoReturn:
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        # As the hook of torch.distributed, which would write it once we are back.
        print(sys.stderr.getvalue(), file=sys.__stderr__, end="", flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_FORWARDING_S)
    expect_end()
    comm.Abort(status)
    os._exit(status)  # some launchers kill only a moment later, and nothing may run until then
