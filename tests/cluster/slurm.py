"""A real SLURM on one Linux machine: munge, slurmctld, and a slurmd on each of several hosts.

As root, with the Debian packages ``slurm-wlm munge`` (and ``libpmix-dev`` for ``srun --mpi=pmix``):

    python -m tests.cluster.slurm -- sbatch --wait jobs/train.sbatch jobs/examples/digits.toml

Each host is a network namespace with a name, an address and a link of its own (see ``hosts.py``).
Everything is in one temporary folder, and is taken down whatever happens.
"""

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.cluster.hosts import SUBNET, Hosts, NoHosts, hosts

ROOT = Path(__file__).parents[2]
_PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "ip", "tc")
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"}

_CONF = """
ClusterName=test
SlurmctldHost=n0({subnet}.1)
AuthType=auth/munge
# Requeued jobs wait until their credentials are worthless, by default two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
JobRequeue=1
KillWait=5
ReturnToService=2
SlurmdTimeout=8
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,bf_interval=1
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


class NoSlurm(RuntimeError):
    """This machine cannot run it: the message says what is missing."""


def missing() -> str | None:
    """Why there can be no cluster here, or None."""
    if os.geteuid() != 0:
        return "a SLURM cluster needs root"
    gone = [name for name in _PROGRAMS if not shutil.which(name)]
    if not gone:
        return None
    return f"a SLURM cluster needs {', '.join(gone)}: apt install slurm-wlm munge libpmix-dev"


class Cluster:
    """A SLURM that is up; ``folder`` has all logs."""

    def __init__(self, up: Hosts, folder: Path, cpus: int) -> None:
        self._up, self.folder = up, folder
        self.nodes = [f"n{i}" for i in range(len(up.addresses))]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._configure(cpus)

    def run(
        self, command: list[str], *, check: bool = True, env: Mapping[str, str] | None = None
    ) -> str:
        """The output of a command on the first node; ``RuntimeError`` if it fails."""
        with self.begin(command, env=env) as begun:
            try:
                out, error = begun.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                begun.kill()
                raise
        if check and begun.returncode:
            raise RuntimeError(f"{' '.join(command)}: {out}{error}")
        return out

    def begin(
        self, command: list[str], *, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A command on the first node, which runs."""
        return subprocess.Popen(
            self._inside("n0", command),
            env={**self._environment(), **(env or {})},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def sbatch(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """Submit; the job's number."""
        return self.run(["sbatch", "--parsable", *arguments], env=env).strip().partition(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """Values of ``scontrol show job``, by key; of an array, of its last task."""
        out = self.run(["scontrol", "show", "job", "-o", number])
        return dict(re.findall(r"(\S+?)=(\S*)", out.splitlines()[-1]))

    def state(self, number: str) -> str:
        """PENDING, RUNNING, COMPLETED ..."""
        return self.job(number)["JobState"]

    def wait(self, number: str, seconds: float, until: set[str] | None = None) -> str:
        """The state of a job once it is in ``until`` (by default: has ended, for good)."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            state = self.state(number)
            if state in (until or _ENDED):
                return state
            time.sleep(0.2)
        raise TimeoutError(f"job {number} is {self.job(number)} after {seconds} s\n{self.logs()}")

    def kill_node(self, name: str) -> None:
        """The node's daemon and everything that it started die at once."""
        self._daemons.pop(name).kill()
        _kill_all(f"{self._up.prefix}{name[1:]}", but=(b"slurmctld", b"munged"))

    def revive_node(self, name: str) -> None:
        """The daemon starts again, as after a reboot: without what its former steps left."""
        for folder in (self.folder / f"spool-{name}", self.folder / f"tmp-{name}"):
            shutil.rmtree(folder)
            folder.mkdir()
        self._start(name, ["slurmd", "-D", "-N", name])

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        socket = f"--socket={self.folder}/munge.socket"
        key = f"--key-file={self.folder}/munge.key"
        subprocess.run(["mungekey", "--create", f"--keyfile={self.folder}/munge.key"], check=True)
        files = [f"--{part}-file={self.folder}/munge.{part}" for part in ("pid", "seed", "log")]
        self._start("munged", ["munged", "--foreground", "--force", socket, key, *files])
        self._start("slurmctld", ["slurmctld", "-D"])
        for name in self.nodes:
            self._start(name, ["slurmd", "-D", "-N", name])
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            states = self.run(["sinfo", "-h", "-p", "low", "-N", "-o", "%T"], check=False).split()
            if states == ["idle"] * len(self.nodes):
                return
            time.sleep(0.2)
        raise NoSlurm(f"the nodes are {states} after 30 s\n{self.logs()}")

    def stop(self) -> None:
        """End all daemons and what they started."""
        for name in reversed(list(self._daemons)):
            self._daemons.pop(name).kill()

    def _configure(self, cpus: int) -> None:
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr={address} CPUs={cpus} RealMemory=1000"
            for name, address in zip(self.nodes, self._up.addresses)
        )
        text = _CONF.format(folder=self.folder, subnet=SUBNET, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        for name in self.nodes:
            (self.folder / f"spool-{name}").mkdir()
            (self.folder / f"tmp-{name}").mkdir()

    def _start(self, name: str, command: list[str]) -> None:
        host = name if name in self.nodes else "n0"
        log = (self.folder / f"{name}.out").open("ab")
        self._daemons[name] = subprocess.Popen(
            self._inside(host, command), env=self._environment(), stdout=log, stderr=log
        )

    def _inside(self, name: str, command: list[str]) -> list[str]:
        # Not `ip netns exec`, which mounts another /sys, without the cgroups that slurmd wants.
        network = f"--net=/run/netns/{self._up.prefix}{name[1:]}"
        enter = ["nsenter", network, "unshare", "--uts", "sh", "-c"]
        return [*enter, 'hostname "$0"; exec "$@"', name, *command]

    def _environment(self) -> dict[str, str]:
        # None of the surrounding job's or launcher's variables.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PMI", "OMPI_"))}
        return {
            **kept,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            # UCX would find out that the hosts share a kernel, and its memory.
            "UCX_TLS": "tcp,self",
        }


@contextlib.contextmanager
def slurm(nodes: int = 2, cpus: int = 4, rate_mbit: int | None = 1000) -> Iterator[Cluster]:
    """A cluster, which is taken down at the end; a second one waits until the first is gone.

    The sockets of both would have the same names.

    Raises:
        NoSlurm: it cannot be had here, or did not come up.
    """
    why = missing()
    if why:
        raise NoSlurm(why)
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    try:
        with open(__file__) as lock, hosts(nodes, rate_mbit) as up:
            fcntl.flock(lock, fcntl.LOCK_EX)
            cluster = Cluster(up, folder, cpus)
            try:
                cluster.start()
                yield cluster
            finally:
                cluster.stop()
                for number in range(nodes):
                    _kill_all(f"{up.prefix}{number}")
    except NoHosts as error:
        raise NoSlurm(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _kill_all(namespace: str, but: tuple[bytes, ...] = ()) -> None:
    """Kills the processes of a host, but for programs whose paths end so."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            program = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
            if not (but and program.endswith(but)):
                os.kill(int(pid), signal.SIGKILL)


def main() -> int:
    """Run a command on the first node of a cluster."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=4, help="of each node (4)")
    parser.add_argument("command", nargs="+", help="behind --")
    options = parser.parse_args()
    with slurm(options.nodes, options.cpus) as cluster:
        print(cluster.run(options.command, check=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
