"""Rendezvous by MPI: ``init_process_group(..., "mpi://")`` needs no address and no port."""

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from mpi4py import MPI
from torch.distributed import TCPStore

from collectives.launchers import check_launch


def rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=5), **_: Any
) -> Iterator[tuple[TCPStore, int, int]]:
    """Rank and size are those of MPI; rank 0 serves torch's store on a port that is free.

    Collective over ``MPI.COMM_WORLD``.  This backend does not use the store; torch's other
    backends and its checkpoints do.
    """
    check_launch()
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    is_one_node = node.size == world.size
    node.Free()
    store, host = None, "127.0.0.1" if is_one_node else socket.gethostname()
    if world.rank == 0:
        store = TCPStore(host, 0, world.size, True, timeout, wait_for_workers=False)
    host, port = world.bcast((host, store.port) if store else None)
    if store is None:
        store = TCPStore(host, port, world.size, False, timeout, wait_for_workers=False)
    yield store, world.rank, world.size
