"""Time that nobody waits for: when streams, copies, messages and the host of one GPU do what.

The host queues work and goes on; a stream does one thing after the other, and so does each way of
the bus and of the network.  What starts when follows from the order in which the host calls, so
that times are known as soon as something is queued.  Kernels of two streams do not slow one
another.
"""

from collections import defaultdict
from typing import NamedTuple


class Rates(NamedTuple):
    """Of a card like an H100, the host that drives it, and an adapter of 400 Gb/s for each card.

    Attributes:
        flops: products of 16 bits, per second, as large ones reach.
        wide_flops: of 32 bits.
        memory: bytes per second that kernels read and write.
        kernel: seconds of the shortest kernel.
        launch: seconds of the host for each kernel or copy that it queues.
        call: seconds of the host for each other call: an event, a message, a question.
        bus: bytes per second between card and host, each way.
        bus_latency: seconds of the shortest copy.
        link: bytes per second of messages, each way.
        latency: seconds of the shortest message.
    """

    flops: float = 500e12
    wide_flops: float = 50e12
    memory: float = 2.5e12
    kernel: float = 3e-6
    launch: float = 6e-6
    call: float = 1e-6
    bus: float = 50e9
    bus_latency: float = 5e-6
    link: float = 45e9
    latency: float = 5e-6


class Span(NamedTuple):
    """What was done from ``start`` to ``end``, in seconds; ``lane`` did it."""

    lane: str
    name: str
    start: float
    end: float


class Timeline:
    """A host, and what it has queued.

    Attributes:
        rates: how fast all is.
        now: the host's time, seconds.
        spans: what was done, in the order of calls.
    """

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.now = 0.0
        self.spans: list[Span] = []
        self._free: defaultdict[str, float] = defaultdict(float)

    def kernel(self, stream: int, name: str, nbytes: float, flops: float, wide: bool) -> None:
        """The host queues a kernel that moves so many bytes and does so many products."""
        rates = self.rates
        products = flops / (rates.wide_flops if wide else rates.flops)
        seconds = max(rates.kernel, nbytes / rates.memory, products)
        self.now += rates.launch
        self._run([_stream(stream)], name, seconds)

    def copy(self, stream: int, nbytes: int, way: str) -> None:
        """The host queues a copy ``"to host"`` or ``"to device"``."""
        self.now += self.rates.launch
        seconds = self.rates.bus_latency + nbytes / self.rates.bus
        self._run([_stream(stream), way], f"copy {way}", seconds)

    def mark(self, stream: int) -> float:
        """An event is recorded; returns when it will be done."""
        self.now += self.rates.call
        return self._free[_stream(stream)]

    def follow(self, stream: int, event: float) -> None:
        """What is queued from here on comes after an event."""
        self.now += self.rates.call
        self._free[_stream(stream)] = max(self._free[_stream(stream)], event)

    def ask(self, event: float) -> bool:
        """Whether an event is done; the host goes on."""
        self.now += self.rates.call
        return event <= self.now

    def wait(self, event: float) -> None:
        """The host stops until it is."""
        self.now = max(self.now, event)

    def synchronize(self, stream: int) -> None:
        """The host stops until all is done that a stream has queued."""
        self.wait(self._free[_stream(stream)])

    def send(self, nbytes: int) -> tuple[float, float]:
        """A message starts now; returns when its last byte has left, and when it is there."""
        self.now += self.rates.call
        left = self._run(["link"], "message", nbytes / self.rates.link)
        return left, left + self.rates.latency

    def busy(self, lane: str) -> float:
        """Seconds in which a lane did something."""
        return sum(span.end - span.start for span in self.spans if span.lane == lane)

    def _run(self, lanes: list[str], name: str, seconds: float) -> float:
        """On all of these lanes at once; returns the end."""
        start = max(self.now, *(self._free[lane] for lane in lanes))
        for lane in lanes:
            self._free[lane] = start + seconds
            self.spans.append(Span(lane, name, start, start + seconds))
        return start + seconds


def _stream(number: int) -> str:
    return f"stream {number}"
