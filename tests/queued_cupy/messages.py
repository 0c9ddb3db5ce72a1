"""Messages whose use of memory the machine hears of."""

import sys

import numpy as np

from collectives.execution.local import LocalTransport
from collectives.execution.transport.mpi import MPITransport
from tests.queued_cupy.machine import Range, bounds


def _host(data):
    return np.asarray(getattr(data, "_a", data))


class Recorded:
    """A request, between whose start and end MPI uses the memory."""

    def __init__(self, inner, machine, data, sends):
        self.inner, self.machine, self.sends = inner, machine, sends
        self.data = data  # which a request keeps
        self.where = bounds(_host(data))
        self.flight = None

    def Start(self):
        if self.where != Range(0, 0):
            name = "a message is sent" if self.sends else "a message is received"
            self.flight = self.machine.depart(self.where, not self.sends, name)
        self.inner.Start()

    def Wait(self):
        self.inner.Wait()
        self.land()

    def land(self):
        if self.flight is not None:
            self.machine.arrive(self.flight)
            self.flight = None

    def Free(self):
        self.inner.Free()


class _Recording:
    """Beside a transport's class, as its messages go; without a stand-in, it records none."""

    given = staticmethod(lambda data: data)  # what the transport itself has

    def send_init(self, data, peer, tag):
        return _recorded(super().send_init(self.given(data), peer, tag), data, True)

    def recv_init(self, data, peer, tag):
        return _recorded(super().recv_init(self.given(data), peer, tag), data, False)

    def testall(self, requests):
        done = super().testall([getattr(request, "inner", request) for request in requests])
        for request in requests if done else ():
            if isinstance(request, Recorded):
                request.land()
        return done


class RecordedTransport(_Recording, MPITransport):
    """MPI's, for ``Communicator(transport=)``; mpi4py finds device memory by its own road."""


class RecordedLocal(_Recording, LocalTransport):
    """Transport of a rank in this process, as the one that it is made of."""

    given = staticmethod(_host)

    def __init__(self, local):
        super().__init__(local.rank, local.size, (local.sends, local.recvs))


def _recorded(inner, data, sends):
    machine = getattr(sys.modules.get("cupy"), "machine", None)
    return inner if machine is None else Recorded(inner, machine, data, sends)
