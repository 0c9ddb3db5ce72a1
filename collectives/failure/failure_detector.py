"""Failure detector: a ring of connections by which a rank sees its neighbours die, without MPI.

The system closes a connection when the process at its other end terminates, for whatever reason.
MPI libraries often name the rank that noticed a death in the place of the dead one.
"""

import atexit
import contextlib
import socket
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from mpi4py import MPI

_CONNECT_S = 2.0
_FAREWELL = b"b"


class Neighbour(NamedTuple):
    """A rank that this rank is connected to."""

    rank: int
    host: str
    connection: socket.socket


class FailureDetector:
    """Connections to the two ranks beside this one; the constructor is collective.

    Attributes:
        alive: neighbours whose connections are open.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        hosts: Sequence[str],
        addresses: Sequence[Sequence[str]],
        token: str,
    ) -> None:
        """Connects; ``hosts`` and ``addresses`` are each rank's, ``token`` is the job's secret."""
        self.alive: list[Neighbour] = []
        self._leaving = False
        self._rank = comm.rank
        rank, size = comm.rank, comm.size
        following, before = (rank + 1) % size, (rank - 1) % size
        with socket.create_server(("", 0)) as listening:
            ports = comm.allgather(listening.getsockname()[1])
            found = None if size == 1 else _connect(addresses[following], ports[following], token)
            if found:
                self.alive.append(Neighbour(following, hosts[following], found))
            if comm.allgather(found is not None)[before]:
                listening.settimeout(_CONNECT_S)
                with contextlib.suppress(OSError):
                    self.alive.append(Neighbour(before, hosts[before], _accept(listening, token)))
        atexit.register(self.close)

    def listen(self, neighbour: Neighbour) -> str:
        """Reads from a readable connection; returns the message to print, or ``""``."""
        try:
            died = neighbour.connection.recv(1) != _FAREWELL
        except OSError:
            died = True
        if self._leaving:  # our farewell may have cut off the one of a neighbour that left first
            return ""
        neighbour.connection.close()
        self.alive.remove(neighbour)
        now = datetime.now().isoformat(timespec="milliseconds")
        text = f"{now} rank {self._rank} saw rank {neighbour.rank} on {neighbour.host} die"
        return text if died else ""

    def close(self) -> None:
        """Says farewell, so that the neighbours do not report the end of this process."""
        atexit.unregister(self.close)
        self._leaving = True
        for neighbour in self.alive:
            with contextlib.suppress(OSError):
                neighbour.connection.send(_FAREWELL)
            neighbour.connection.close()
        self.alive.clear()


def _connect(addresses: Sequence[str], port: int, token: str) -> socket.socket | None:
    for address in addresses:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, port), _CONNECT_S)
            connection.sendall(token.encode())
            return connection
    return None


def _accept(listening: socket.socket, token: str) -> socket.socket:
    """Next connection whose peer knows the job's secret."""
    while True:
        connection, _ = listening.accept()
        connection.settimeout(_CONNECT_S)
        if connection.recv(len(token), socket.MSG_WAITALL).decode(errors="replace") == token:
            return connection
        connection.close()
