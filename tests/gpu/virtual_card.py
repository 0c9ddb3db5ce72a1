"""The strict stand-in for CuPy, with a timeline in the place of work: shapes are real, numbers not.

Streams and events are those of a :class:`~tests.gpu.timeline.Timeline`, in which every kernel, copy
and message that the program queues takes its time.
"""

from itertools import count

import numpy as np

from collectives.execution.transport.cuda_memory import CudaMemory
from tests import strict_cupy
from tests.strict_cupy.counts import counts


class Timed:
    """Answers the stand-in in the place of work: :attr:`Counts.timeline`."""

    def __init__(self, timeline):
        self.timeline = timeline
        self.current = [0]

    def launch(self, name, run, like, reads, kernels, flops):
        """The result, of which only the shape is right where ``like`` makes one."""
        found = run() if like is None else like()
        moved = [one.nbytes for one in reads] + [getattr(found, "nbytes", 0)]
        wide = any(one.itemsize > 2 for one in reads)
        for _ in range(kernels):
            self.timeline.kernel(self.current[-1], name, sum(moved), flops / kernels, wide)
        return found

    def upload(self, nbytes, stream=None):
        ptr = self.current[-1] if stream is None else stream.ptr
        self.timeline.copy(ptr, nbytes, "to device")

    def synchronize(self):
        self.timeline.synchronize(self.current[-1])


def install(patch, timeline):
    """``cupy`` in ``sys.modules`` until ``patch`` takes it away."""
    cupy = strict_cupy.install(patch)
    timed = Timed(timeline)
    patch.setattr(counts, "timeline", timed)
    patch.setattr(counts, "allowed", True)
    cupy.cuda.Stream, cupy.cuda.Event = classes(timed)
    cupy.cuda.get_current_stream = lambda device_id=-1: cupy.cuda.Stream.at(timed.current[-1])
    return cupy


def classes(timed):
    """CuPy's streams and events."""
    timeline, numbers = timed.timeline, count(1)

    class Stream:
        def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
            self.ptr = 0 if null else next(numbers)

        @classmethod
        def at(cls, ptr):
            found = cls(null=True)
            found.ptr = ptr
            return found

        def synchronize(self):
            timeline.synchronize(self.ptr)

        def wait_event(self, event):
            timeline.follow(self.ptr, event.time)

        def __enter__(self):
            timed.current.append(self.ptr)
            return self

        def __exit__(self, *exception):
            timed.current.pop()

    class Event:
        def __init__(self, block=False, disable_timing=False, interprocess=False):
            self.time = 0.0

        def record(self, stream=None):
            self.time = timeline.mark(timed.current[-1] if stream is None else stream.ptr)

        @property
        def done(self):
            return timeline.ask(self.time)

        def synchronize(self):
            timeline.wait(self.time)

    return Stream, Event


class VirtualMemory(CudaMemory):
    """Memory of the card; copies take the bus."""

    def download(self, host, device):
        counts.timeline.timeline.copy(counts.timeline.current[-1], device.nbytes, "to host")

    def upload(self, device, host):
        counts.timeline.upload(device.nbytes)


class BlockingMemory(VirtualMemory):
    """As it was before gates: plans work on the compute stream, and the host stops at each message
    until all is done that is queued there."""

    @property
    def stream(self):
        return self.cupy.cuda.Stream.at(0)

    def event(self):
        event = super().event()

        class Blocking(type(event)):
            @property
            def done(self):
                self.synchronize()
                return True

        return Blocking()


class Mirror:
    """The transport of one rank of several that all do the same at the same time.

    What a rank receives has left its peer when the rank's own message of the same number left.  No
    bytes move.
    """

    longest = 1 << 62

    def __init__(self, timeline, size):
        self.timeline, self.rank, self.size = timeline, 0, size
        self.arrivals, self.received = [], 0

    def send_init(self, data, peer, tag):
        return _Sent(self, data.nbytes)

    def recv_init(self, data, peer, tag):
        return _Received(self)

    def testall(self, requests):
        self.timeline.now += self.timeline.rates.call
        return all(request.time() <= self.timeline.now for request in requests)


class _Sent:
    def __init__(self, mirror, nbytes):
        self._mirror, self._nbytes = mirror, nbytes

    def Start(self):
        self._left, arrives = self._mirror.timeline.send(self._nbytes)
        self._mirror.arrivals.append(arrives)

    def time(self):
        return self._left

    def Wait(self):
        self._mirror.timeline.wait(self.time())

    def Free(self):
        """Nothing to release."""


class _Received:
    def __init__(self, mirror):
        self._mirror = mirror

    def Start(self):
        self._mirror.timeline.now += self._mirror.timeline.rates.call
        self._number, self._mirror.received = self._mirror.received, self._mirror.received + 1

    def time(self):
        arrivals = self._mirror.arrivals
        return arrivals[self._number] if self._number < len(arrivals) else np.inf

    def Wait(self):
        self._mirror.timeline.wait(self.time())

    def Free(self):
        """Nothing to release."""
