"""Several hosts on one Linux machine: network namespaces with names, addresses and a shaped link.

As root:

    python -m tests.cluster.hosts --hosts 2 --ranks 2 --rate 1000 -- -m collectives bench allreduce

runs Python with these arguments under ``mpirun``, on so many hosts with so many ranks each.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SUBNET = "10.77.0"
#: Script that mpirun calls in place of ssh: drops the options, maps the address to its namespace.
_AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
number=$((${1##*.} - 1)); shift
exec ip netns exec {prefix}$number unshare --uts sh -c 'hostname "$0"; shift 0; eval "$*"' \\
    node$number "$@"
"""


class NoHosts(RuntimeError):
    """This machine cannot make them: the message says what is missing."""


@dataclass(frozen=True)
class Hosts:
    """Hosts that are up."""

    addresses: list[str]
    agent: Path  # for mpirun, its launch agent
    prefix: str  # of their namespaces' names

    def run(self, host: int, command: list[str], **options: object) -> subprocess.CompletedProcess:
        """Runs a command on one host; options as those of ``subprocess.run``."""
        return subprocess.run([*self.inside(host), *command], **options)  # type: ignore[call-overload]

    def inside(self, host: int) -> list[str]:
        """The words before a command that make it run on one host."""
        inside = ["ip", "netns", "exec", f"{self.prefix}{host}", "unshare", "--uts", "sh", "-c"]
        return [*inside, 'hostname "$0"; exec "$@"', f"node{host}"]

    def mpirun(
        self, ranks: int | Sequence[int], program: list[str], connections: int = 3
    ) -> list[str]:
        """The command that starts ``program``, to be run on host 0.

        Args:
            ranks: of every host, or of each.
            connections: of Open MPI between two ranks; with one, large messages in both directions
                take turns.
        """
        binary = Path(sys.executable).parent
        each = [ranks] * len(self.addresses) if isinstance(ranks, int) else ranks
        slots = ",".join(f"{host}:{n}" for host, n in zip(self.addresses, each, strict=True))
        total = str(sum(each))
        if not _is_openmpi():
            launch = ["-launcher", "ssh", "-launcher-exec", str(self.agent), "-hosts", slots]
            return [str(binary / "mpiexec"), *launch, "-n", total, *program]
        network = f"{SUBNET}.0/24"
        return [
            str(binary / "mpirun"),
            *("--prtemca", "plm_ssh_agent", str(self.agent)),
            *("--prtemca", "prte_if_include", network),
            *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"),
            *("--mca", "btl_tcp_if_include", network),
            *("--mca", "btl_tcp_links", str(connections)),
            *("--host", slots, "-n", total, "--map-by", ":oversubscribe", "--bind-to", "none"),
            *program,
        ]


@contextlib.contextmanager
def hosts(
    count: int, rate_mbit: int | None = None, delay_ms: float | None = None
) -> Iterator[Hosts]:
    """Makes ``count`` hosts on one switch, and takes them down whatever happens.

    Args:
        rate_mbit: of each host's link, in each direction; ``None`` for as fast as it goes.
        delay_ms: of each message on its way to another host.

    Raises:
        NoHosts: without root, or without iproute2.
    """
    if os.geteuid() != 0:
        raise NoHosts("network namespaces need root")
    if not shutil.which("ip") or not shutil.which("tc"):
        raise NoHosts("network namespaces need iproute2 (ip and tc)")
    prefix = f"mpitrain{os.getpid()}n"
    switch = f"{prefix}switch"
    made: list[str] = []
    folder = Path(tempfile.mkdtemp())
    try:
        for name in [switch, *(f"{prefix}{i}" for i in range(count))]:
            _call("ip", "netns", "add", name)
            made.append(name)
            _call("ip", "-n", name, "link", "set", "lo", "up")
        _call("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "br0", "up")
        for i in range(count):
            host, port = f"{prefix}{i}", f"p{i}"
            _call(
                *("ip", "-n", host, "link", "add", "eth0", "type", "veth"),
                *("peer", "name", port, "netns", switch),
            )
            _call("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _call("ip", "-n", host, "addr", "add", f"{SUBNET}.{i + 1}/24", "dev", "eth0")
            _call("ip", "-n", host, "link", "set", "eth0", "up")
            if rate_mbit is not None:
                # Bursts of 8 ms, and more than segments of 64 KiB, which would be dropped.
                burst = f"{max(128, rate_mbit)}kb"
                shape = ["rate", f"{rate_mbit}mbit", "burst", burst, "latency", "100ms"]
                _call("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", "tbf", *shape)
            if delay_ms is not None:
                # On the switch's side, so that it does not stand in the way of the rate.
                delay = ["netem", "delay", f"{delay_ms}ms", "limit", "100000"]
                _call("tc", "-n", switch, "qdisc", "add", "dev", port, "root", *delay)
        agent = folder / "agent.sh"
        agent.write_text(_AGENT.replace("{prefix}", prefix))
        agent.chmod(0o755)
        yield Hosts([f"{SUBNET}.{i + 1}" for i in range(count)], agent, prefix)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)
        shutil.rmtree(folder)


def environment() -> dict[str, str]:
    """Variables for the ranks: this folder's packages, and no way round the link.

    UCX would find out that the hosts share a kernel, and its memory.
    """
    return {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "UCX_TLS": "tcp,self",
        "GLOO_SOCKET_IFNAME": "eth0",  # the hosts' names have no addresses
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


def _is_openmpi() -> bool:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return MPI.get_vendor()[0] == "Open MPI"


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise NoHosts(f"{' '.join(command)}: {error.stderr.strip()}") from None


def main() -> int:
    """Runs Python under mpirun on several hosts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    of_hosts = "of every host (2), or a number for each: --ranks 1 3"
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help=of_hosts)
    parser.add_argument("--rate", type=int, help="of each host's link, Mb/s each way")
    parser.add_argument("--delay", type=float, help="of each message, ms")
    parser.add_argument("program", nargs="+", help="arguments of python, behind --")
    options = parser.parse_args()
    each = options.ranks if len(options.ranks) > 1 else options.ranks * options.hosts
    if len(each) != options.hosts:
        parser.error(f"--ranks has {len(each)} numbers for {options.hosts} hosts")
    with hosts(options.hosts, options.rate, options.delay) as up:
        command = up.mpirun(each, [sys.executable, *options.program])
        return up.run(0, command, env=environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
