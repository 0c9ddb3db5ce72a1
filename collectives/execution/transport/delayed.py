"""Messages that arrive as over a slower link: real ranks and real data, and time that is made up.

A message is there for its receiver only after the latency of the link, and the time that its bytes
take on it, have passed since it was started.  Each rank has a link of its own, in each direction
one, as a machine with one rank has: messages that it sends leave one after the other, and messages
that come to it at the same time arrive one after the other.  Ranks that are to share the link of
one machine are not modelled: divide the bandwidth by their number.

A message carries the time at which it is due, so all ranks must see one clock, which those of one
machine do, in containers and network namespaces, too; others are refused.  Neither lost packets nor
the slow start of TCP are modelled; what MPI itself takes comes on top where it is longer.
"""

import copyreg
import re
import threading
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isfinite
from random import Random
from time import monotonic, sleep
from typing import Any, ClassVar, Self

import numpy as np
from mpi4py import MPI

from collectives.execution.transport import Bytes
from collectives.execution.transport.mpi import Envelope, EnvelopedTransport
from collectives.execution.waiting import give_way

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BITS = {"Gb/s": 1e9, "Mb/s": 1e6, "kb/s": 1e3}
_NUMBER = r"(\d+(?:\.\d+)?)"
#: Seconds below which a rank polls: a sleep takes some 0.1 ms longer than asked for.
_SHORT = 2e-4
#: Arrivals that are remembered, for those that come in at the same time.
_REMEMBERED = 64


@dataclass(frozen=True)
class Link:
    """A link that messages cross.

    Attributes:
        latency: seconds, the least and the most; drawn evenly for each message.
        bandwidth: bits a second.
    """

    latency: tuple[float, float] = (0.0, 0.0)
    bandwidth: float = inf

    def __post_init__(self) -> None:
        least, most = self.latency
        if not (0 <= least <= most and isfinite(most)):
            raise ValueError(f"a latency of {least} to {most} s must be 0 or more, the least first")
        if not self.bandwidth > 0:
            raise ValueError(f"a bandwidth of {self.bandwidth} bit/s must be above 0")

    @classmethod
    def read(cls, text: str) -> Self:
        """``far``, ``latency=100ms,bandwidth=100Mb/s``, ``home,latency=1ms..10ms`` and the like.

        Raises:
            ValueError: it is none; the message says what there is.
        """
        link = cls()
        for number, part in enumerate(part.strip() for part in text.split(",")):
            key, equals, value = part.partition("=")
            if not equals and number == 0 and part in PROFILES:
                link = cls(*PROFILES[part])
            elif key == "latency" and (found := re.fullmatch(_LATENCY, value)):
                least = float(found[1]) * _SECONDS[found[2]]
                most = float(found[3]) * _SECONDS[found[4]] if found[3] else least
                link = replace(link, latency=(least, most))
            elif key == "bandwidth" and (found := re.fullmatch(_BANDWIDTH, value)):
                link = replace(link, bandwidth=float(found[1]) * _BITS[found[2]])
            else:
                raise ValueError(
                    f"{text!r}: {part!r} is no part of a link, as in {', '.join(PROFILES)}, "
                    "latency=100ms, latency=1ms..10ms (s, ms, us) or bandwidth=100Mb/s "
                    "(Gb/s, Mb/s, kb/s)"
                )
        return link

    def seconds(self, nbytes: int) -> float:
        """Seconds that ``nbytes`` keep it busy."""
        return 8 * nbytes / self.bandwidth

    def __str__(self) -> str:
        least, most = (f"{1e3 * seconds:g}ms" for seconds in self.latency)
        latency = f"latency={least}" if least == most else f"latency={least}..{most}"
        if not isfinite(self.bandwidth):
            return latency
        return f"{latency},bandwidth={self.bandwidth / 1e6:g}Mb/s"


_LATENCY = rf"{_NUMBER}(s|ms|us)(?:\.\.{_NUMBER}(s|ms|us))?"
_BANDWIDTH = rf"{_NUMBER}(Gb/s|Mb/s|kb/s)"
#: By name: a data centre, a home's uplink, and a home on another continent.
PROFILES: dict[str, tuple[tuple[float, float], float]] = {
    "cluster": ((1e-6, 1e-6), 100e9),
    "home": ((1e-3, 10e-3), 100e6),
    "far": ((162e-3, 200e-3), 100e6),
}


class Adapter:
    """Where this rank meets its link: when what it sends has left, and when what comes is there.

    Times are of ``time.monotonic``.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._free_at = 0.0
        self._arrivals: list[tuple[float, float]] = []
        self._dice = Random(0)
        self._turn = threading.Lock()

    def send(self, nbytes: int, now: float) -> tuple[float, float]:
        """A message starts: when its last byte has left, and when it is due at its receiver."""
        with self._turn:
            left = max(now, self._free_at) + self.link.seconds(nbytes)
            self._free_at = left
            return left, left + self._dice.uniform(*self.link.latency)

    def receive(self, nbytes: int, due: float) -> float:
        """When a message is there: as it is due, or later if others arrive in the meantime.

        It takes the first gap between those that is long enough, in whatever order they are seen.
        """
        length = self.link.seconds(nbytes)
        with self._turn:
            begin = due - length
            for start, stop in self._arrivals:
                if begin + length <= start:
                    break
                begin = max(begin, stop)
            if length:
                self._arrivals.append((begin, begin + length))
                self._arrivals.sort()
                del self._arrivals[:-_REMEMBERED]
            return begin + length


class Stamped(Envelope):
    """Bytes and the time at which they are due at their receiver."""

    def __init__(self, data: Bytes, adapter: Adapter) -> None:
        super().__init__(data, np.float64)
        self._adapter = adapter
        self._there: float | None = None

    def seal(self) -> None:
        self._there, self.number[0] = self._adapter.send(self.data.nbytes, monotonic())

    def expect(self) -> None:
        self._there = None

    def is_there(self) -> bool:
        return monotonic() >= self._moment()

    def check(self, comm: MPI.Intracomm, source: int | None) -> None:
        while (left := self._moment() - monotonic()) > 0:
            if left > _SHORT:
                sleep(left - _SHORT / 2)
            else:
                give_way()

    def _moment(self) -> float:
        if self._there is None:
            self._there = self._adapter.receive(self.data.nbytes, float(self.number[0]))
        return self._there


class DelayedTransport(EnvelopedTransport):
    """As :class:`MPITransport` over a slower link; :func:`delayed` gives one with a link.

    Attributes:
        adapter: the process's adapter; all communicators with this transport share it.
    """

    delays = True
    adapter: ClassVar[Adapter] = Adapter(Link())

    @classmethod
    def envelope(cls, data: Bytes) -> Stamped:
        return Stamped(data, cls.adapter)


def delayed(link: Link | str) -> type[DelayedTransport]:
    """The transport over a link, for ``Communicator(transport=...)``.

    >>> comm = Communicator(MPI.COMM_WORLD, transport=delayed("far"))   # doctest: +SKIP

    Equal links give one class, as a rank has one link for all its communicators.

    Args:
        link: or the text of one: ``cluster`` (1 us, 100 Gb/s), ``home`` (1 to 10 ms, 100 Mb/s),
            ``far`` (162 to 200 ms, 100 Mb/s), ``latency=100ms,bandwidth=1Gb/s``.

    Raises:
        ValueError: there is no such link.
    """
    return _transport(Link.read(link) if isinstance(link, str) else link)


class _OfLink(type):
    """The classes that :func:`delayed` makes while the program runs."""


@cache
def _transport(link: Link) -> type[DelayedTransport]:
    made: Any = _OfLink("DelayedTransport", (DelayedTransport,), {"adapter": Adapter(link)})
    return made


def _reduce(transport: Any) -> Any:
    """For pickle, which finds such a class by its link, and one derived of it by its name."""
    link = transport.adapter.link
    return (delayed, (link,)) if transport is _transport(link) else transport.__qualname__


copyreg.pickle(_OfLink, _reduce)
