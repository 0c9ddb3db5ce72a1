"""Messages whose use of memory the machine hears of."""

import sys

import numpy as np

from collectives.execution.transport.mpi import MPITransport
from tests.queued_cupy.machine import Range, bounds


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


class RecordedLocal:
    """Around the transport of ranks in one process."""

    def __init__(self, inner, machine):
        self.inner, self.machine = inner, machine
        self.rank, self.size, self.longest = inner.rank, inner.size, inner.longest

    def send_init(self, data, peer, tag):
        inner = self.inner.send_init(_host(data), peer, tag)
        return Recorded(inner, self.machine, data, True)

    def recv_init(self, data, peer, tag):
        inner = self.inner.recv_init(_host(data), peer, tag)
        return Recorded(inner, self.machine, data, False)

    def testall(self, requests):
        done = self.inner.testall([request.inner for request in requests])
        if done:
            for request in requests:
                request.land()
        return done


def _host(data):
    return np.asarray(getattr(data, "_a", data))


class RecordedTransport(MPITransport):
    """MPI's, for ``Communicator(transport=)``; mpi4py finds device memory by its own road."""

    def send_init(self, data, peer, tag):
        return self._recorded(super().send_init(data, peer, tag), data, True)

    def recv_init(self, data, peer, tag):
        return self._recorded(super().recv_init(data, peer, tag), data, False)

    @staticmethod
    def _recorded(inner, data, sends):
        machine = getattr(sys.modules.get("cupy"), "machine", None)
        return inner if machine is None else Recorded(inner, machine, data, sends)

    @staticmethod
    def testall(requests):
        inner = [getattr(request, "inner", request) for request in requests]
        done = MPITransport.testall(inner)
        if done:
            for request in requests:
                if isinstance(request, Recorded):
                    request.land()
        return done
