"""Asking the other ranks how far they are, while they and we are stuck in MPI.

Each rank answers datagrams from a thread of its own, so it needs no MPI and no shared file, and
what gives no answer is dead, stopped, or out of reach.  A rank whose program ends tells the others.
"""

import contextlib
import json
import os
import secrets
import socket
from pathlib import Path
from time import monotonic
from typing import Any

from mpi4py import MPI

#: Largest answer with its stack, in bytes: it must fit a datagram.
MOST_BYTES = 32_000
#: A datagram may get lost, so a rank is asked this often.
_TRIES = 3
#: Verbs of messages.
_ASKS, _HAS_ENDED = "asks", "has-ended"
#: Of a process that does not answer, by its letter in ``/proc/PID/stat``.
_STATES = {
    "": "is gone: it has died",
    "Z": "is gone: it has died",
    "T": "does not answer: it is stopped",
    "t": "does not answer: a debugger has stopped it",
}
_ALIVE = (
    "does not answer and is alive: it is in code that keeps Python's lock, as mpi4py's methods for "
    "objects do while they wait, or has dropped this communicator"
)
#: Ranks listed in a message before "and N more".
_SHOWN = 8


class Peers:
    """The ranks' sockets; making it is collective.

    Attributes:
        socket: readable when another rank asks.
        job: the ranks' numbers in the job, by which people know them.
        ended: ranks whose programs have ended: how many collectives they had made, and when this
            rank has heard of it.
        left_to: when a lower rank, which waits as well, last asked all others.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.job = comm.group.Translate_ranks(None, MPI.COMM_WORLD.group)
        if MPI.UNDEFINED in self.job:  # spawned
            self.job = list(range(self.size))
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("", 0))
        self.socket.setblocking(False)
        host, port = socket.gethostname(), self.socket.getsockname()[1]
        #: Nobody outside of the job gets an answer.
        self.token = comm.bcast(secrets.token_hex(16))
        told = comm.allgather((host, port, os.getpid()))
        self.hosts, self._ports, self._numbers = (list(one) for one in zip(*told))
        #: By which each of them can be reached.
        self.addresses = [["127.0.0.1"]] * self.size
        if set(self.hosts) != {host}:
            found = comm.allgather(_addresses(host))
            for rank, name in enumerate(self.hosts):
                if name != host:
                    self.addresses[rank] = found[rank]
        self.ended: dict[int, tuple[int, float]] = {}
        self.left_to = float("-inf")

    def answer(self, status: dict[str, Any]) -> None:
        """Takes one message that has come in, if no other thread has; answers a question.

        Args:
            status: JSON, short but for its ``"stack"``, a text that loses its beginning where the
                answer would be longer than ``MOST_BYTES``.
        """
        # Whoever asked asks again, and no failure here may end the thread that watches.
        with contextlib.suppress(OSError, ValueError):
            said, address = self.socket.recvfrom(100)
            token, *what = said.decode(errors="replace").split()
            if token != self.token:
                return
            match what:
                case [verb, rank, made] if verb == _HAS_ENDED:
                    self.ended.setdefault(int(rank), (int(made), monotonic()))
                    return
                case [_, rank] if int(rank) < self.rank:
                    self.left_to = monotonic()
            self.socket.sendto(_fitting(status), address)

    def ask(self, seconds: float) -> dict[int, dict[str, Any]]:
        """The status of every other rank that answers in time."""
        answers: dict[int, dict[str, Any]] = {}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _ in range(_TRIES):
                for rank in range(self.size):
                    if rank not in answers and rank not in self.ended:
                        self._send(asking, rank, f"{_ASKS} {self.rank}")
                deadline = monotonic() + seconds / _TRIES
                expected = self.size - 1 - len(self.ended)
                while len(answers) < expected and monotonic() < deadline:
                    asking.settimeout(max(0.01, deadline - monotonic()))
                    try:
                        status = json.loads(asking.recv(MOST_BYTES + 1))
                    except (OSError, ValueError):
                        continue
                    answers[status["rank"]] = status
        return answers

    def say_farewell(self, made: int) -> None:
        """The program of this rank ends, after ``made`` collectives."""
        for rank in range(self.size):
            self._send(self.socket, rank, f"{_HAS_ENDED} {self.rank} {made}")

    def state(self, rank: int) -> str:
        """Of a rank that does not answer, for people."""
        on = f"on {self.hosts[rank]}"
        if rank in self.ended:
            return f"{on} has ended: its program is over"
        if self.hosts[rank] != socket.gethostname():
            return f"{on} does not answer: it is dead, stopped or out of reach"
        try:
            stat = Path(f"/proc/{self._numbers[rank]}/stat").read_text()
            letter = stat.rpartition(")")[2].split()[0]
        except OSError:
            letter = ""
        return f"{on} {_STATES.get(letter, _ALIVE)}"

    def _send(self, by: socket.socket, rank: int, what: str) -> None:
        if rank == self.rank:
            return
        for address in self.addresses[rank]:
            # No way there is the same as no answer.
            with contextlib.suppress(OSError):
                by.sendto(f"{self.token} {what}".encode(), (address, self._ports[rank]))

    @property
    def group(self) -> str:
        """Which ranks of the job these are, or nothing if all."""
        if len(self.job) == MPI.COMM_WORLD.size:
            return ""
        more = f" and {self.size - _SHOWN} more" if self.size > _SHOWN else ""
        return f"ranks {', '.join(map(str, self.job[:_SHOWN]))}{more}"

    def close(self) -> None:
        """No more answers."""
        self.socket.close()


def _fitting(status: dict[str, Any]) -> bytes:
    """Whole JSON of at most ``MOST_BYTES``; characters take one to six of them."""
    while True:
        encoded = json.dumps(status, ensure_ascii=False).encode(errors="replace")
        stack = status["stack"]
        if len(encoded) <= MOST_BYTES or not stack:
            return encoded
        status = {**status, "stack": stack[len(stack) // 8 + 1 :]}


def _addresses(host: str) -> list[str]:
    """Addresses by which other hosts may reach this one."""
    found: list[str] = []
    with contextlib.suppress(OSError):  # a host may not know its own name
        found += [str(info[4][0]) for info in socket.getaddrinfo(host, None, socket.AF_INET)]
    for network in ("10.255.255.255", "192.168.255.255", "172.16.255.255"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                probe.connect((network, 1))  # sends nothing; only asks for the way
                found.append(str(probe.getsockname()[0]))
            except OSError:
                continue
    return list(dict.fromkeys(address for address in found if not address.startswith("127.")))
