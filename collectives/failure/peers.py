"""Sockets by which ranks ask one another for their progress while they are stuck in MPI.

A thread of each rank answers datagrams, without MPI or shared files.  A rank that does not answer
is dead, stopped or out of reach.  A rank whose program ends says so to the others.
"""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
from time import monotonic
from typing import Any

from mpi4py import MPI

from collectives.failure.processes import find

#: Largest answer with its stack, in bytes: it must fit a datagram.
MOST_BYTES = 32_000
#: Questions to a rank, as a datagram may get lost.
_TRIES = 3
#: Linux: asks for the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915
#: Verbs of messages.
_ASKS, _HAS_ENDED = "asks", "has-ended"
#: Descriptions of a silent process by the letter of its state.
_STATES = {"T": "does not answer: it is stopped", "t": "does not answer: a debugger has stopped it"}
_GONE = "is gone: it has died"
_ALIVE = (
    "does not answer and is alive: it is in code that keeps Python's lock, as mpi4py's methods for "
    "objects do while they wait, or has dropped this communicator"
)
#: Ranks listed in a message before "and N more".
_SHOWN = 8


class Peers:
    """The ranks' sockets; the constructor is collective.

    Attributes:
        socket: readable when another rank asks.
        job: each rank's number in the job, for messages to people.
        ended: for each rank whose program has ended, the number of its collectives, and when the
            message about its end came.
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
        #: Secret of the job, without which nobody gets an answer.
        self.token = comm.bcast(secrets.token_hex(16))
        gathered = comm.allgather((host, port, os.getpid()))
        self.hosts, self._ports, self._numbers = (list(one) for one in zip(*gathered))
        #: Addresses by which each rank can be reached.
        self.addresses = [["127.0.0.1"]] * self.size
        if set(self.hosts) != {host}:
            found = comm.allgather(addresses_of(host))
            for rank, name in enumerate(self.hosts):
                if name != host:
                    self.addresses[rank] = found[rank]
        self.ended: dict[int, tuple[int, float]] = {}
        self.left_to = float("-inf")

    def answer(self, status: dict[str, Any]) -> None:
        """Reads one message, if no other thread has read it, and answers a question.

        Args:
            status: the answer, as JSON; its ``"stack"`` loses its beginning where the answer would
                be longer than ``MOST_BYTES``.
        """
        # A rank asks several times, and no failure here may end the thread that watches.
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
        """Statuses of the other ranks that answer within ``seconds``, by rank."""
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
        """Sends that this rank's program ends after ``made`` collectives."""
        for rank in range(self.size):
            self._send(self.socket, rank, f"{_HAS_ENDED} {self.rank} {made}")

    def state(self, rank: int) -> str:
        """Sentence for people about a rank that does not answer."""
        on = f"on {self.hosts[rank]}"
        if rank in self.ended:
            return f"{on} has ended: its program is over"
        if self.hosts[rank] != socket.gethostname():
            return f"{on} does not answer: it is dead, stopped or out of reach"
        process = find(self._numbers[rank])
        if process is None or process.has_ended:
            return f"{on} {_GONE}"
        return f"{on} {_STATES.get(process.state, _ALIVE)}"

    def _send(self, by: socket.socket, rank: int, what: str) -> None:
        if rank == self.rank:
            return
        for address in self.addresses[rank]:
            # An unreachable rank is treated as one that does not answer.
            with contextlib.suppress(OSError):
                by.sendto(f"{self.token} {what}".encode(), (address, self._ports[rank]))

    @property
    def group(self) -> str:
        """Text with these ranks' numbers in the job; empty if they are all ranks."""
        if len(self.job) == MPI.COMM_WORLD.size:
            return ""
        more = f" and {self.size - _SHOWN} more" if self.size > _SHOWN else ""
        return f"ranks {', '.join(map(str, self.job[:_SHOWN]))}{more}"

    def close(self) -> None:
        self.socket.close()


def _fitting(status: dict[str, Any]) -> bytes:
    """Valid JSON of at most ``MOST_BYTES``; a character takes one to six bytes."""
    while True:
        encoded = json.dumps(status, ensure_ascii=False).encode(errors="replace")
        stack = status["stack"]
        if len(encoded) <= MOST_BYTES or not stack:
            return encoded
        status = {**status, "stack": stack[len(stack) // 8 + 1 :]}


def addresses_of(host: str) -> list[str]:
    """IPv4 addresses of this host, whose name is given, at which others may reach it."""
    found: list[str] = []
    with contextlib.suppress(OSError):  # a host may not know its own name
        found += [str(info[4][0]) for info in socket.getaddrinfo(host, None, socket.AF_INET)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it may have no such address
                told = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
                found.append(socket.inet_ntoa(told[20:24]))
    return list(dict.fromkeys(address for address in found if not address.startswith("127.")))
