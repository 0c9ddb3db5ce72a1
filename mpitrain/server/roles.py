"""Roles of ranks: servers, and workers in groups that push together."""

from dataclasses import dataclass

from mpi4py import MPI

from collectives import Communicator
from mpitrain.config import ConfigError, Server
from mpitrain.group import share
from mpitrain.metrics.words import counted


@dataclass(frozen=True)
class Roles:
    """The ranks of a job with servers: first the workers, then the servers.

    Neighbouring workers form groups; the first worker of each talks to the servers.
    """

    workers: int
    servers: int
    groups: int

    def is_server(self, rank: int) -> bool:
        return rank >= self.workers

    def server(self, number: int) -> int:
        return self.workers + number

    def members(self, group: int) -> range:
        part = share(self.workers, group, self.groups)
        return range(part.start, part.stop)

    def group(self, rank: int) -> int:
        return next(group for group in range(self.groups) if rank in self.members(group))

    def leaders(self) -> list[int]:
        """The ranks that talk to the servers, by group."""
        return [self.members(group).start for group in range(self.groups)]

    def __str__(self) -> str:
        together = f" in {counted(self.groups, 'group')}" if self.groups < self.workers else ""
        servers = f", {counted(self.servers, 'server')}" if self.servers else ""
        return f"{counted(self.workers, 'worker')}{together}{servers}"


@dataclass(frozen=True)
class Members:
    """The ranks of a job with servers, seen from this one.

    Attributes:
        roles: role of each rank.
        is_server, number: whether this rank is one, and its number; negative on a worker.
        group: the workers that push together with this one; on a server, itself.
        alike: all workers, or all servers.
        wire: messages of workers and servers.
    """

    roles: Roles
    is_server: bool
    number: int
    group: Communicator
    alike: Communicator
    wire: MPI.Intracomm


def roles(server: Server, ranks: int) -> Roles:
    """The roles of a job's ranks; ``ConfigError``: there are too few ranks."""
    workers = ranks - server.ranks
    if workers < 1:
        raise ConfigError(
            f"server.ranks = {server.ranks} of {counted(ranks, 'rank')} leaves no worker; start "
            f"{server.ranks + 1} ranks or more, or take fewer servers"
        )
    if server.groups > workers:
        raise ConfigError(
            f"server.groups = {server.groups} of {counted(workers, 'worker')}: a group has one at "
            "least; make fewer groups"
        )
    return Roles(workers, server.ranks, server.groups or workers)
