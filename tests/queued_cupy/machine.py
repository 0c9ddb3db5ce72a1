"""GPUs whose work is queued: nothing happens until somebody waits for it, or later.

Every operation is appended to a stream with the ranges of memory that it reads and writes.  The
executor carries queued operations out in any order that streams and events allow: only what is
waited for and nothing before it must be (``lazy``), or drawn ones beside it.  So work that nobody
has ordered gives other numbers than on a machine that is kind.

Order is checked without luck, too: two operations that touch the same bytes, one of them writing,
must be ordered by streams, events or a host that has waited (a vector clock for each operation,
Lamport, CACM 21, 1978; Mattern, 1989).  A pair that is not is a :class:`Race`, kept in ``races``.
"""

import os
import random
import threading
from bisect import bisect_right, insort
from collections import deque
from contextvars import Context
from typing import NamedTuple

import numpy as np

from tests.queued_cupy.memory import POISON

#: Operations that are put off; a GPU has some such number, too.
_MOST = 400


class Range(NamedTuple):
    """Addresses ``start`` up to ``stop``."""

    start: int
    stop: int

    def meets(self, other):
        return self.start < other.stop and other.start < self.stop


class Race(NamedTuple):
    """Two uses of the same bytes that nobody has ordered."""

    first: str
    second: str


class Op:
    """Something that a stream does; it may have to wait for other ranks until it ``is_ready``."""

    def __init__(self, stream, name, act, after, clock, reads, writes):
        self.stream, self.name, self.act, self.after = stream, name, act, after
        self.clock, self.reads, self.writes = clock, reads, writes
        self.number = clock[stream.ptr]
        self.done = False
        self.is_ready = None

    def comes_after(self, clock):
        """Whether who has this clock has waited for it."""
        return clock.get(self.stream.ptr, 0) >= self.number


class Stream:
    """A queue of one device; ``blocking`` ones and the null stream wait for one another."""

    def __init__(self, machine, ptr, device, blocking):
        self.machine, self.ptr, self.device, self.blocking = machine, ptr, device, blocking
        self.queue = deque()
        self.clock = {}
        self.last = None
        self.awaited = []


class Allocation(NamedTuple):
    """Memory of a device, or of the host for ``None``."""

    start: int
    stop: int
    device: int | None


class Flight(NamedTuple):
    """A message that MPI reads or writes memory for."""

    where: Range
    writes: bool
    name: str


class Machine:
    """Several devices and the host that drives them.

    Args:
        devices: how many.
        seed: ``None`` for the laziest order; otherwise of drawn ones.
        prompt: each operation is done as soon as it is queued, for another library that knows
            nothing of the queues.

    Attributes:
        races: what nobody has ordered.
        waits: how often the host has waited.
    """

    def __init__(self, devices=1, seed=None, prompt=False):
        self.prompt = prompt
        self.random = random.Random(0 if seed is None else seed)
        self.lazy = seed is None
        self.device_count = devices
        self.streams = {}
        self.null = [self.stream(device, blocking=True) for device in range(devices)]
        self.host = {}
        self.races = []
        self.waits = 0
        self._used = []
        self._queued = deque()
        self._flights = []
        self._allocations = []
        self._freed = []
        self._pools = {}
        self._kept = []
        self._dropped = []
        self._running = False
        # A device warns of nothing.  In a context of its own, as Python may collect an array, and
        # run a queue for it, in the midst of any code, whose np.errstate stays as it is.
        self._unwarned = Context()
        self._unwarned.run(np.seterr, all="ignore")
        self._lock = threading.RLock()  # of threads that wait or ask for others' work

    # Streams and what they do.

    def stream(self, device, blocking=False):
        """A new one."""
        made = Stream(self, 16 * (len(self.streams) + 1), device, blocking)
        self.streams[made.ptr] = made
        return made

    def launch(self, stream, name, act, reads=(), writes=()):
        """Queues ``act``; returns the operation."""
        with self._lock:
            self._take_back()
            return self._launch(stream, name, act, tuple(reads), tuple(writes))

    def _launch(self, stream, name, act, reads, writes):
        for one in (*reads, *writes):
            self._expect_reachable(one, stream.device, name)
        after = [op for op in (stream.last, *stream.awaited) if op is not None]
        stream.awaited = []
        if stream.blocking:
            after += [
                other.last
                for other in self.streams.values()
                if other.device == stream.device
                and other.blocking
                and other.last is not None
                and self.null[stream.device] in (stream, other)
            ]
        clock = dict(self.host)
        for op in after:
            _merge(clock, op.clock)
        clock[stream.ptr] = clock.get(stream.ptr, 0) + 1
        after = [op for op in after if not op.done]
        op = Op(stream, name, act, after, clock, reads, writes)
        self._note(op)
        stream.last = op
        stream.queue.append(op)
        self._queued.append(op)
        if self.prompt and not self._running and name != "NCCL writes":
            self._run(op)
        if len(self._queued) > _MOST and not self._running:
            for _ in range(_MOST // 2):
                self._run(self._queued.popleft())
            self._used = [used for used in self._used[-_MOST:] if not used[0].done]
        return op

    def mark(self, stream):
        """An operation that does nothing, for an event."""
        return self.launch(stream, "event", None)

    def wait(self, stream, op):
        """Later work on ``stream`` comes after ``op``."""
        if op is not None:
            stream.awaited.append(op)

    # The host.

    def finish(self, op):
        """The host waits for ``op``."""
        self.waits += 1
        if op is not None:
            with self._lock:
                self._run(op)
                self._passed(op)

    def is_done(self, op):
        """The host asks; sooner or later it is."""
        if op is None:
            return True
        if not op.done and self.random.random() < 0.5:
            return False
        with self._lock:
            if not self._run(op, waits=False):
                return False
            self._passed(op)
        return True

    def settle(self, device):
        """The host waits for all of a device."""
        for stream in [*self.streams.values()]:
            if stream.device == device:
                self.finish(stream.last)

    def on_host(self, where, writes, name):
        """The host, or MPI for it, uses memory now."""
        for op, one, wrote in self._used:
            if (writes or wrote) and one.meets(where) and not op.comes_after(self.host):
                self._race(op.name, name)

    def depart(self, where, writes, name):
        """MPI uses memory from now on until :meth:`arrive`."""
        self.on_host(where, writes, name)
        flight = Flight(where, writes, name)
        self._flights.append(flight)
        return flight

    def arrive(self, flight):
        """The message is complete."""
        self._flights.remove(flight)

    # The executor.

    def _run(self, target, waits=True):
        """Until ``target`` is done, or waits for other ranks; whether it is done."""
        if self._running:
            raise RuntimeError("an operation waits for another one")
        self._running = True
        try:
            while not target.done:
                heads = [s.queue[0] for s in self.streams.values() if s.queue]
                heads = [op for op in heads if all(other.done for other in op.after)]
                if self.lazy:
                    heads = [op for op in heads if op.comes_after(target.clock)]
                if not heads:
                    raise RuntimeError(f"{target.name}: the streams wait for one another for ever")
                ready = [op for op in heads if op.is_ready is None or op.is_ready()]
                if not ready:
                    if not waits:
                        return False
                    os.sched_yield()
                    continue
                op = self.random.choice(ready)
                op.stream.queue.popleft()
                if op.act is not None:
                    self._unwarned.run(op.act)
                op.done, op.act, op.after, op.is_ready = True, None, (), None
        finally:
            self._running = False
        while self._dropped:
            self.unmap(*self._dropped.pop())
        return True

    # Who has used what.

    def _note(self, op):
        for one, wrote in [*((r, False) for r in op.reads), *((w, True) for w in op.writes)]:
            if one.start == one.stop:
                continue
            for other, where, written in self._used:
                meets = (wrote or written) and one.meets(where) and other is not op
                if meets and not other.comes_after(op.clock):
                    self._race(other.name, op.name)
            for flight in self._flights:
                if (wrote or flight.writes) and one.meets(flight.where):
                    self._race(flight.name, op.name)
            self._used.append((op, one, wrote))

    def _race(self, first, second):
        self.races.append(Race(first, second))

    def _passed(self, op):
        """The host has waited for this; it drops uses that come before all later ones."""
        _merge(self.host, op.clock)
        self._used = [used for used in self._used if not used[0].comes_after(self.host)]

    # Memory.

    def allocate(self, nbytes, stream):
        """The address of memory from the pool of a stream: the block that was freed last, if one
        fits, whatever other streams still do with it."""
        self._take_back()
        size = max(512, -(-nbytes // 512) * 512)
        pool = self._pools.setdefault((stream.ptr, size), [])
        if pool:
            return pool.pop(), size
        block = np.full(size + 512, POISON, np.uint8)
        self._kept.append(block)
        start = -(-block.ctypes.data // 512) * 512
        self.register(start, size, stream.device)
        return start, size

    def free(self, start, size, stream):
        """It may be another's from now on: in the order of its stream it holds something else."""
        self._freed.append((start, size, stream))

    def _take_back(self):
        while self._freed:
            start, size, stream = self._freed.pop()
            memory = view_at(start, size)
            poison = lambda memory=memory: memory.fill(POISON)  # noqa: E731
            self._launch(stream, "memory that was freed", poison, (), (Range(start, start + size),))
            self._pools[stream.ptr, size].append(start)

    @property
    def in_use(self):
        """Allocations that somebody has: pools keep what was freed."""
        self._take_back()
        return len(self._allocations) - sum(len(pool) for pool in self._pools.values())

    def total_bytes(self):
        """Bytes on devices, as CuPy's pool counts them, what was freed included."""
        return sum(a.stop - a.start for a in self._allocations if a.device is not None)

    def register(self, start, nbytes, device):
        """So that other devices cannot reach it; of the host for ``None``."""
        insort(self._allocations, Allocation(start, start + nbytes, device), key=lambda a: a.start)

    def unmap(self, start, device):
        """Waits for a device, then unregisters; in the midst of an operation, which may drop what
        Python collects, once it has ended."""
        if self._running:
            self._dropped.append((start, device))
            return
        self.settle(device)
        self.unregister(start)

    def unregister(self, start):
        """It is gone.  Raises ``RuntimeError`` if queued work uses it."""
        found = self._find(start)
        gone = Range(found.start, found.stop)
        for op, where, _ in self._used:
            if not op.done and where.meets(gone):
                self._race(op.name, "memory that is unmapped")
        self._allocations.remove(found)

    def _find(self, address):
        at = bisect_right(self._allocations, address, key=lambda a: a.start)
        found = self._allocations[at - 1] if at else None
        return found if found is not None and address < found.stop else None

    def _expect_reachable(self, where, device, name):
        if where.start == where.stop:
            return
        found = self._find(where.start)
        if found is not None and found.device not in (None, device):
            raise RuntimeError(
                f"cudaErrorIllegalAddress: {name} on device {device} uses memory of {found.device}"
            )

    def expect_no_races(self):
        """Raises ``AssertionError`` with the first of them."""
        assert not self.races, f"{len(self.races)} races: {self.races[:3]}"


def _merge(clock, other):
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def bounds(array):
    """The bytes of an array of the host's."""
    return Range(*np.lib.array_utils.byte_bounds(array)) if array.size else Range(0, 0)


def view_at(start, nbytes):
    """Bytes at an address."""
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start))
