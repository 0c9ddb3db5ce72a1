"""End of the whole job when one rank fails, or when its launcher has died.

``docs/failures.md`` says what happens when a rank dies.
"""

import io
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from mpi4py import MPI

from collectives.environment import switch
from collectives.failure.processes import Process, find
from collectives.launchers import PROCESSES

#: Packages whose frames are not the user's code.
LIBRARIES = {"collectives", "mpitrain", "numpy", "torch", *sys.stdlib_module_names}

#: Seconds for the launcher to forward output before an abort; MPICH's may lose a traceback.
_FORWARDING_S = 0.2
#: Seconds for one rank to write an error that all ranks have raised, and to end the job.
_FIRST_S = 3
#: Seconds for ``Abort``, which takes milliseconds or never returns.
_ABORT_S = 5
#: Seconds for the launcher, which may wait 15 minutes for a node that it cannot reach.
_LAUNCHER_S = 30
#: Seconds between two looks at the parent process.
_PARENT_S = 1.0
#: Exit status of a rank whose parent has died: 128 + SIGHUP.
ORPHANED = 129


@contextmanager
def abort_on_exception(comm: MPI.Comm) -> Iterator[None]:
    """Ends the whole job when this rank fails; its traceback is written first.

    Without it the other ranks wait for this one for ever.  ``SystemExit`` with status 0 or none
    passes; any other ends the job with that status.  A rank whose parent dies ends too; MPICH's
    ranks otherwise run on when the daemon of their node is killed, and ``mpiexec`` waits for them.
    """
    over, own = threading.Event(), os.getpid()
    if comm.size > 1:
        threading.Thread(
            target=_end_with, args=(os.getppid(), comm.rank, over), daemon=True
        ).start()
    try:
        yield
    except BaseException as error:
        if os.getpid() != own or MPI.Is_finalized():
            raise  # a child that a program has forked is no rank; nobody waits after Finalize
        if comm.size == 1 or (isinstance(error, SystemExit) and error.code in (None, 0)):
            raise
        end_job(comm, error)
    finally:
        over.set()


def end_job(comm: MPI.Comm, error: BaseException, why: str = "") -> NoReturn:
    """Ends all ranks because of an error on this one; its traceback is written first.

    The exit status is 1, or that of a ``SystemExit`` if it is not 0.

    Args:
        error: the error; a ``SystemExit`` without ``why`` is written without its traceback.
        why: a sentence for people, written after the traceback.
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
        with suppress(Exception):  # as of an import, where no file can be opened any more
            if calls := getattr(comm, "report_calls", str)():
                print(calls, file=sys.stderr)
    _abort(comm, status if isinstance(status, int) and status % 256 else 1)


def note_shared(comm: MPI.Comm, error: BaseException, teller: int = 0) -> None:
    """Marks an error that all ranks raise, so that rank ``teller`` writes it for all."""
    if comm.size == MPI.COMM_WORLD.size and not hasattr(error, "_teller"):
        abort_when_uncaught()
        with suppress(AttributeError, TypeError):  # a class may take no attributes
            error._teller = teller  # type: ignore[attr-defined]


class _AbortingHook:
    """``sys.excepthook`` or ``threading.excepthook`` that ends the job after the ``previous`` one
    has written the traceback."""

    def __init__(self, previous: Callable[..., object]) -> None:
        self.previous = previous
        self._process = os.getpid()

    def __call__(self, *raised: Any) -> None:
        in_thread = len(raised) == 1
        error = raised[0].exc_value if in_thread else raised[1]
        comm = MPI.COMM_WORLD
        forked = os.getpid() != self._process  # such a child is no rank
        alone = forked or MPI.Is_finalized() or comm.size == 1 or isinstance(error, SystemExit)
        words = _sentence(error) if self.previous is sys.__excepthook__ else ""
        if not alone:
            _say_where(comm, error, words)
        if words:
            print(words, file=sys.stderr, flush=True)
        else:
            self.previous(*raised)
        if forked and not in_thread:
            sys.stderr.flush()
            os._exit(1)  # mpi4py would finalise MPI at the end of the child, and that may hang
        if hasattr(sys, "ps1"):  # at a prompt, the exception ends nothing
            return
        if not alone:
            _abort(comm, error.exit_status if words else 1)
        if words:
            raise SystemExit(error.exit_status)


def abort_when_uncaught() -> None:
    """Installs hooks: an exception that nobody catches on this rank, in whatever thread, ends the
    whole job.

    Python writes its traceback first.  A second call does nothing, nor does any call if
    ``COLLECTIVES_ABORT`` is off.
    """
    for module in (sys, threading) if aborts() else ():
        if not isinstance(module.excepthook, _AbortingHook):
            module.excepthook = _AbortingHook(module.excepthook)  # type: ignore[attr-defined]


def aborts() -> bool:
    return "COLLECTIVES_ABORT" not in os.environ or switch("COLLECTIVES_ABORT")


def outside(frame: FrameType | None, packages: Container[str] = LIBRARIES) -> FrameType | None:
    """The innermost frame outside of some packages, from ``frame`` on."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in packages:
        frame = frame.f_back
    return frame


def _sentence(error: Any) -> str:
    """Text and user's line, in the place of a traceback, of an error that all ranks share and whose
    class has an ``exit_status``; empty for others, and where the user's code raised its cause.
    """
    if not (hasattr(error, "exit_status") and hasattr(error, "_teller")):
        return ""
    users = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if outside(frame) is frame
    ]
    cause = error.__cause__ or error.__context__
    while cause is not None:
        if any(outside(frame) is frame for frame, _ in traceback.walk_tb(cause.__traceback__)):
            return ""
        cause = cause.__cause__ or cause.__context__
    package = type(error).__module__.partition(".")[0]
    return f"{package}: {error} ({users[-1]})" if users else ""


def _say_where(comm: MPI.Comm, error: BaseException, words: str = "") -> None:
    """Writes which rank failed, unless ``words`` stand for its traceback; waits first if another
    rank writes the error of all ranks."""
    where = f"rank {comm.rank} of {comm.size} on {socket.gethostname()}"
    teller = getattr(error, "_teller", None)
    if teller == comm.rank:
        where = f"all {comm.size} ranks"
    elif teller is not None:
        time.sleep(_FIRST_S)  # the job ends meanwhile, unless that rank has caught the error
    if not words:
        print(f"[{where}] ", file=sys.stderr, end="", flush=True)


def _end_with(parent: int, rank: int, over: threading.Event) -> None:
    """Ends this process when its parent has ended; returns once ``over`` is set."""
    while not over.wait(_PARENT_S):
        if os.getppid() != parent:
            with suppress(OSError):  # the launcher may have read our stderr
                print(
                    f"[rank {rank} on {socket.gethostname()}] process {parent}, the launcher's on "
                    "this node, is gone, and this rank ends with it",
                    file=sys.stderr,
                    flush=True,
                )
            os._exit(ORPHANED)


def expect_end(own: float = _ABORT_S, launcher: float = _LAUNCHER_S) -> None:
    """Starts a shell that kills this process and its launcher if the abort does not end them.

    Where another node cannot be reached, MPICH's ``Abort`` may never return, and no thread of
    Python runs meanwhile; Open MPI's ``mpirun`` waits for that node's daemon.

    Args:
        own: seconds until this process is killed.
        launcher: seconds until the launcher's processes on this node are killed.
    """
    itself = find(os.getpid())
    if itself is None:  # no file can be opened: the abort must do
        return
    kills = [f"sleep {own}", _kill(itself), f"sleep {launcher - own}", *map(_kill, _launchers())]
    with suppress(OSError):  # as above
        subprocess.Popen(
            ["sh", "-c", "; ".join(kills)],
            start_new_session=True,  # it outlives this process
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _kill(process: Process) -> str:
    """A shell command that kills a process, unless its number is another process's by then."""
    stat = f"/proc/{process.number}/stat"
    # In other locales, a name with half a letter has characters that "." is none of.
    began = f'LC_ALL=C sed "s/.*) //" {stat} 2>/dev/null | cut -d" " -f20'
    return f'[ "$({began})" = {process.began} ] && kill -KILL {process.number}'


def _launchers() -> Iterator[Process]:
    """The parent and, if it runs on this node, the launcher above it."""
    parent = number = os.getppid()
    while number > 1 and (process := find(number)):
        launches = process.name.startswith(PROCESSES)
        if launches or number == parent:
            yield process
        if launches:
            return
        number = process.parent


def _abort(comm: MPI.Comm, status: int) -> NoReturn:
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        # The hook of torch.distributed collects stderr, and would write it after we return.
        print(sys.stderr.getvalue(), file=sys.__stderr__, end="", flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_FORWARDING_S)
    expect_end()
    ours = threading.current_thread() is threading.main_thread()
    if ours or MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        comm.Abort(status)
    os._exit(status)  # nothing may run until the launcher kills this process
