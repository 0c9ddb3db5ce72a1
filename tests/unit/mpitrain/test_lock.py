"""One job at a time in a run's folder, and no lock that outlives its owner."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from mpitrain.config import ConfigError
from mpitrain.ranks import lock
from mpitrain.ranks.lock import NAME, Owner, locked, myself

ROOT = Path(__file__).parents[3]
HOLDER = """
import signal, sys, time
from pathlib import Path
from mpi4py import MPI
from mpitrain.ranks import lock
from mpitrain.ranks.lock import locked
if sys.argv[2:]:
    lock._PATIENCE_S = float(sys.argv[2])
signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored
with locked(MPI.COMM_SELF, Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.3)


def holder(folder, *patience):
    """A process that holds the folder's lock as soon as it gets it."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *patience],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.fixture
def other(tmp_path):
    """Another process that works in the folder."""
    with holder(tmp_path) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


@pytest.fixture(params=["fcntl", "no fcntl"])
def with_and_without_fcntl(request, monkeypatch):
    """Without, as on a file system that has no such locks."""

    def lockf(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    if request.param == "no fcntl":
        monkeypatch.setattr(fcntl, "lockf", lockf)


either = pytest.mark.usefixtures("with_and_without_fcntl")


def take(folder):
    with locked(MPI.COMM_SELF, folder):
        return msgspec.json.decode((folder / NAME).read_bytes(), type=Owner)


def left(folder, **changed):
    """Lock that an owner left who is not here any more."""
    gone = Owner("elsewhere", 7, "7", "", "then")
    (folder / NAME).write_bytes(msgspec.json.encode(replace(gone, **changed)))


def test_it_names_its_owner_and_is_gone_afterwards(tmp_path):
    folder = tmp_path / "new" / "run"
    assert replace(take(folder), since="") == replace(myself(), since="")
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(KeyError), locked(MPI.COMM_SELF, folder):
        raise KeyError
    assert not list(folder.iterdir())


@either
def test_one_that_works_is_left_alone(tmp_path, other):
    with pytest.raises(ConfigError) as caught:
        take(tmp_path)
    told = str(caught.value)
    assert f"run.dir = '{tmp_path}' belongs to another job (process {other.pid} on " in told
    assert f"remove {tmp_path / NAME}" in told


@either
def test_an_unfinished_one_of_the_same_process_keeps_it(tmp_path):
    """As where on_record of one trainer begins another one."""
    with locked(MPI.COMM_SELF, tmp_path):
        with pytest.raises(ConfigError, match=r"another job \(an unfinished one of this program"):
            take(tmp_path)
        assert (tmp_path / NAME).exists()
    take(tmp_path)


@either
@pytest.mark.parametrize("waited_for", [True, False])
def test_one_that_was_killed_is_in_nobodys_way(tmp_path, other, waited_for):
    other.send_signal(signal.SIGKILL)
    if waited_for:
        other.wait()
    assert take(tmp_path).process == os.getpid()


def test_one_that_ends_in_time_is_waited_for(tmp_path, other, monkeypatch):
    monkeypatch.setattr(lock, "_PATIENCE_S", 20.0)
    with subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -INT {other.pid}"]):
        assert take(tmp_path).process == os.getpid()


def test_a_number_that_is_another_process_by_now(tmp_path):
    left(tmp_path, host=myself().host, process=os.getppid(), began="1")
    assert take(tmp_path).process == os.getpid()


def test_nobody_can_tell_of_another_host(tmp_path):
    left(tmp_path, job="8")
    with pytest.raises(ConfigError, match="process 7 on elsewhere of job 8"):
        take(tmp_path)


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "PMIX_NAMESPACE"])
def test_a_job_that_was_queued_again_goes_on(tmp_path, monkeypatch, name):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv(name, "31")
    left(tmp_path, job="31")
    assert take(tmp_path).job == "31"


@pytest.mark.parametrize("content", [b"", b'{"host":"elsewh', b"\xff"])
def test_one_that_was_never_completed(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    assert take(tmp_path).process == os.getpid()


def test_of_many_that_come_at_once_one_gets_it(tmp_path):
    with ExitStack() as stack:
        racers = [stack.enter_context(holder(tmp_path, "0")) for _ in range(3)]
        deadline = time.monotonic() + 30
        while sum(racer.poll() is None for racer in racers) > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        alive = [racer for racer in racers if racer.poll() is None]
        for racer in racers:
            racer.kill()
        said = [racer.communicate()[1].decode() for racer in racers]
    assert len(alive) == 1, said
    assert sum("belongs to another job" in words for words in said) == 2, said
