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
        coded: bytes of a push over those of the parameters.
        stepping: seconds of an optimiser's step of all parameters.
    """

    machine: Machine
    nbytes: float
    batch_seconds: float
    fixed_seconds: float = 0.0
    synchronous: bool = True
    pulls: float = 1.0
    pushes: float = 1.0
    coded: float = 1.0
    stepping: float = 0.0

    def seconds(self, servers: int) -> float:
        """Seconds of a step with this many servers, each with a part of the parameters.

        T = compute / workers + fixed + pulls and pushes of (servers alpha + bytes beta) + step.  A
        server's link has the bytes of all workers: those who wait for one another take turns at it;
        others are slowed down only where it is busy all the time.  A server takes a step for each
        push; if workers wait, one for all.
        """
        workers = self.machine.ranks - servers
        link = self.machine.link(self.machine.ranks, 1)
        calls = (self.pulls + self.pushes) * servers * (link.alpha + self.machine.call)
        step = self.pushes * self.stepping / servers
        alone = self.computing(servers) + calls + step
        pulled, pushed = (times * link.beta * self.nbytes for times in self.moved)
        crowd = max(1.0, workers / servers)
        if self.synchronous:
            return alone + crowd * (pulled + pushed)
        return max(alone + pulled + pushed, crowd * max(pulled, pushed) + workers * step)

    def computing(self, servers: int) -> float:
        """Seconds of a step in which a worker computes."""
        return self.batch_seconds / (self.machine.ranks - servers) + self.fixed_seconds

    @property
    def moved(self) -> tuple[float, float]:
        """Bytes that a worker pulls and pushes in a step, over those of the parameters."""
        return self.pulls, self.pushes * self.coded

    def best(self) -> int:
        """The number of servers with the fastest step."""
        return min(range(1, self.machine.ranks), key=self.seconds)
