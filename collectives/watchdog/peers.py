"""Asking the other ranks how far they are, while they and we are stuck in MPI.

Each rank answers datagrams from a thread of its own, so it needs no MPI and no shared file, and
what gives no answer is dead, stopped, or out of reach.
"""

import contextlib
import json
import secrets
import socket
from time import monotonic
from typing import Any

from mpi4py import MPI

#: Largest answer with its stack, in bytes: it must fit a datagram.
MOST_BYTES = 32_000
#: A datagram may get lost, so a rank is asked this often.
_TRIES = 3
#: Ranks listed in a message before "and N more".
_SHOWN = 8


class Peers:
    """The ranks' sockets; making it is collective.

    Attributes:
        socket: readable when another rank asks.
        job: the ranks' numbers in the job, by which people know them.
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
        told = comm.allgather((host, _addresses(host), port))
        self.hosts = [name for name, _, _ in told]
        #: By which each of them can be reached.
        self.addresses = [["127.0.0.1"] if name == host else found for name, found, _ in told]
        self._ports = [port for _, _, port in told]

    def answer(self, status: dict[str, Any]) -> None:
        """Answers one question that has come in, if no other thread has taken it.

        Args:
            status: JSON, short but for its ``"stack"``, a text that loses its beginning where the
                answer would be longer than ``MOST_BYTES``.
        """
        # Whoever asked asks again, and no failure here may end the thread that watches.
        with contextlib.suppress(OSError):
            question, address = self.socket.recvfrom(100)
            if question.decode(errors="replace") == self.token:
                self.socket.sendto(_fitting(status), address)

    def ask(self, seconds: float) -> dict[int, dict[str, Any]]:
        """The status of every other rank that answers in time."""
        answers: dict[int, dict[str, Any]] = {}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _ in range(_TRIES):
                for rank, addresses in enumerate(self.addresses):
                    if rank != self.rank and rank not in answers:
                        for address in addresses:
                            _send(asking, self.token, (address, self._ports[rank]))
                deadline = monotonic() + seconds / _TRIES
                while len(answers) < self.size - 1 and monotonic() < deadline:
                    asking.settimeout(max(0.01, deadline - monotonic()))
                    try:
                        status = json.loads(asking.recv(MOST_BYTES + 1))
                    except (OSError, ValueError):
                        continue
                    answers[status["rank"]] = status
        return answers

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


def _send(asking: socket.socket, token: str, route: tuple[str, int]) -> None:
    try:
        asking.sendto(token.encode(), route)
    except OSError:  # no way there: the same as no answer
        return


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
