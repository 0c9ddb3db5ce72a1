"""Lock of a run's folder: a file that names its owner, so that one job at a time works there.

The file is made atomically (``O_EXCL``) and locked (``fcntl``) where the file system can; the lock
ends with its owner's process.  It is taken over from an owner that is dead on this host, and from
an earlier owner of the same job, which SLURM has queued again or a step of which has ended.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep, strftime

import msgspec
from mpi4py import MPI
from msgspec import Struct

from collectives.failure import find
from collectives.files import check_regular
from mpitrain.config import ConfigError
from mpitrain.files import is_at
from mpitrain.ranks.together import together

NAME = "lock.json"
#: Seconds that ranks of a killed job, and their last writes, may take to be gone.
_PATIENCE_S = 3.0
_POLL_S = 0.1
_LARGEST = 1 << 16
#: Launchers' variables with the name of the job; the first one that is set counts.
_JOB = ("SLURM_JOB_ID", "PMIX_NAMESPACE")
#: Variables with equal values in all simultaneous processes of a step of a job.
_STEP = ("SLURM_RESTART_COUNT", "SLURM_STEP_ID")


class Owner(Struct, frozen=True):
    """Owner of a folder.

    Attributes:
        host, process: rank 0's.
        began: start of that process in the system's ticks, which makes its number unique.
        job: the launcher's name of the job, or empty.
        since: date and time, for people.
        step: SLURM's restart count of the job and number of its step, or empty.
    """

    host: str
    process: int
    began: str
    job: str
    since: str
    step: str = ""

    def __str__(self) -> str:
        job = f" of job {self.job}" if self.job else ""
        return f"process {self.process} on {self.host}{job}, since {self.since}"

    def may_work(self, own: "Owner") -> bool:
        """Whether it may be alive and another job, as far as ``own`` can see."""
        if self.host == own.host:
            # Without /proc the lock of the file alone tells, as it does on one host.
            known = own.began and self.process != own.process
            return bool(known) and began(self.process) == self.began
        beside = self.step and self.step == own.step  # two of one step, which run at once
        return bool(not self.job or self.job != own.job or beside)


def began(number: int) -> str:
    """Start of a process in the system's ticks; empty if it has ended, also as a zombie."""
    process = find(number)
    return "" if process is None or process.has_ended else process.began


@contextmanager
def locked(comm: MPI.Intracomm, folder: Path) -> Iterator[None]:
    """Makes and locks ``folder`` for this job; collective to enter.

    ConfigError on all ranks: another job is in it, or it cannot be written.
    """
    handle = together(comm, lambda: _take(folder) if comm.rank == 0 else None, ConfigError)
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):  # the folder may be gone
                if is_at(handle, folder / NAME):
                    (folder / NAME).unlink()
            os.close(handle)


def myself() -> Owner:
    """Owner that is this process."""
    number = os.getpid()
    return Owner(
        host=socket.gethostname(),
        process=number,
        began=began(number),
        job=next((os.environ[name] for name in _JOB if os.environ.get(name)), ""),
        since=strftime("%Y-%m-%d %H:%M:%S"),
        step=".".join(os.environ.get(name, "0") for name in _STEP)
        if os.environ.get("SLURM_STEP_ID")
        else "",
    )


def _take(folder: Path) -> int:
    """Takes the lock's file; returns its descriptor."""
    own, path = myself(), folder / NAME
    deadline = monotonic() + _PATIENCE_S
    try:
        # A new folder is private; an old one keeps its permissions.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            late = monotonic() > deadline
            handle, why = _try(path, own, late=late)
            if handle is not None:
                return handle
            if late:
                raise ConfigError(
                    f"run.dir = {str(folder)!r} belongs to another job ({why}); wait for its end "
                    f"or choose another run.dir, or, if that job is gone, remove {path}"
                )
            sleep(_POLL_S)
    except OSError as error:
        raise ConfigError(
            f"run.dir = {str(folder)!r} is no folder that can be written ({error.strerror}); "
            "choose another run.dir"
        ) from error


def _try(path: Path, own: Owner, *, late: bool) -> tuple[int | None, str]:
    """Our descriptor, or the file's owner in words; ``late``: take a file without an owner."""
    leaving, beginning = "one that is about to end", "one that has just begun"
    if _is_here(path):
        return None, f"an unfinished one of this program, process {own.process}"
    new = True
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        new = False
        try:
            check_regular(path)
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None, leaving
    try:
        free, owner = _lock(handle), _owner(os.pread(handle, _LARGEST, 0))
        if not free:
            why = str(owner or beginning)
        elif not is_at(handle, path):
            why = leaving
        elif owner is not None and owner.may_work(own):
            why = str(owner)
        elif owner is None and not (new or late):
            why = beginning
        else:
            os.ftruncate(handle, 0)
            os.pwrite(handle, msgspec.json.encode(own) + b"\n", 0)
            os.fsync(handle)
            return handle, ""
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None, why


def _is_here(path: Path) -> bool:
    """Whether this process has the file open, which its own lock does not tell it."""
    with suppress(FileNotFoundError):  # a system without /proc
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the listing itself is closed by now
                if is_at(int(number), path):
                    return True
    return False


def _lock(handle: int) -> bool:
    """Whether this process has locked the file; true where the file system has no locks."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True


def _owner(data: bytes) -> Owner | None:
    try:
        return msgspec.json.decode(data, type=Owner)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
