"""Rendezvous by MPI: ``init_process_group(..., "mpi://")`` needs no address and no port."""

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from mpi4py import MPI
from torch.distributed import TCPStore

from collectives.failure.peers import addresses_of
from collectives.launchers import check_launch

#: Address of the own host.
_SELF = "127.0.0.1"
#: Seconds for a connection to one address.
_CONNECT_S = 5


def rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=5), **_: Any
) -> Iterator[tuple[TCPStore, int, int]]:
    """Rank and size are those of MPI; rank 0 serves torch's store on a port that is free.

    Collective over ``MPI.COMM_WORLD``.  This backend does not use the store; torch's other
    backends and its checkpoints do.

    Raises:
        LaunchError: a launcher started more processes than MPI sees.
        RuntimeError: this host cannot reach the one of rank 0.
    """
    check_launch()
    world, host, store = MPI.COMM_WORLD, socket.gethostname(), None
    if world.rank == 0:
        store = TCPStore(_SELF, 0, world.size, True, timeout, wait_for_workers=False)
    told = (host, addresses_of(host), store.port) if store else None
    server, addresses, port = world.bcast(told)
    if store is None:
        address = _SELF if host == server else _reachable(server, addresses, port)
        store = TCPStore(address, port, world.size, False, timeout, wait_for_workers=False)
    yield store, world.rank, world.size


def _reachable(server: str, addresses: list[str], port: int) -> str:
    """The first address that takes a connection; hosts may not know each other's names."""
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), _CONNECT_S):
            return address
    raise RuntimeError(
        f"torch's store is on {server}, and {socket.gethostname()} reaches none of its addresses "
        f"({', '.join(addresses) or 'it knows none'}) at port {port}; a firewall may be between"
    )
