"""A step with parameter servers, beside one in which all ranks sum their gradients."""

from dataclasses import dataclass

from mpitrain.search.machine import Machine


@dataclass(frozen=True)
class ServerExchange:
    """Workers that pull parameters from servers, compute and push gradients.

    Attributes:
        machine: the cluster.
        nbytes: bytes of the parameters.
        batch_seconds: seconds in which one rank computes the whole batch, which workers share.
        fixed_seconds: further ones of each worker, however few samples it has.
        synchronous: whether all workers push before any pulls again.
        pulls, pushes: pulls and pushes of a worker in a step, at most 1.
    """

    machine: Machine
    nbytes: float
    batch_seconds: float
    fixed_seconds: float = 0.0
    synchronous: bool = True
    pulls: float = 1.0
    pushes: float = 1.0

    def seconds(self, servers: int) -> float:
        """Seconds of a step with this many servers, each with a part of the parameters.

        T = compute / workers + fixed + pulls and pushes of (servers alpha + bytes beta).  A
        server's link has the bytes of all workers: those who wait for one another take turns at it;
        others are slowed down only where it is busy all the time.
        """
        workers = self.machine.ranks - servers
        link = self.machine.link(self.machine.ranks, 1)
        times = self.pulls + self.pushes
        calls = times * servers * (link.alpha + self.machine.call)
        alone = self.batch_seconds / workers + self.fixed_seconds
        one = link.beta * self.nbytes
        crowd = max(1.0, workers / servers)
        if self.synchronous:
            return alone + calls + times * crowd * one
        return max(alone + calls + times * one, max(self.pulls, self.pushes) * crowd * one)

    def best(self) -> int:
        """The number of servers with the fastest step."""
        return min(range(1, self.machine.ranks), key=self.seconds)
