"""Time and traffic of the steps on this rank, and the records of steps, equal on all ranks."""

import os
import socket
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import nan
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType

from collectives import Communicator, Traffic
from mpitrain import extras
from mpitrain.arrays import Array, Scalar
from mpitrain.device import HOST
from mpitrain.metrics.records import RankTime, Step, Straggler, Synced, Times
from mpitrain.parallel.grid import Coordinates
from mpitrain.ranks.together import T, together
from mpitrain.training.batches import MicroBatches
from mpitrain.update.agreement import Agreed, StepReport

if TYPE_CHECKING:
    from mpitrain.training.parts import Parts

#: A straggler takes this many times its peers' median, and is this many seconds slower.
_FACTOR, _SECONDS = 1.5, 0.05


class Begun(NamedTuple):
    """A step that has begun.

    Attributes:
        step: number of the step, counted from 1.
        epoch, samples, lr: as in :class:`~mpitrain.metrics.records.Step`.
        scale: loss scale of its gradient.
    """

    step: int
    epoch: int
    samples: int
    lr: float
    scale: float = 1.0


class Account:
    """Measures the seconds and bytes of each step.

    Attributes:
        spent: this rank's seconds of computation since the last search for a straggler, at its
            place among zeros.
        noise: with ``run.noise_scale``, its averages.
        drift: that of the last exchange that was reported.
    """

    def __init__(self, parts: "Parts") -> None:
        """All sums begin at 0; collective."""
        comm, config = parts.comm, parts.config
        self._comm, self._parts = comm, parts
        place = parts.grid.place
        is_uneven = config.parallel.attention == "ring" or parts.grid.layout.rows
        is_server = comm.rank >= comm.size - config.server.ranks
        peers = place.stage, place.context if is_uneven else 0, is_server
        told = comm.allgather((peers, socket.gethostname(), os.sched_getaffinity(0)))
        cores: dict[str, list[set[int]]] = {}
        for _, host, own in told:
            cores.setdefault(host, []).append(own)
        crowded = {host: len(every) > len(set().union(*every)) for host, every in cores.items()}
        #: For each rank a value of its amount of work, its host, and whether ranks share cores.
        self._ranks = [(kind, host, crowded[host]) for kind, host, _ in told]
        self._traffic = traffic_of(comm)
        self._before = self._counted()
        #: Bytes that this rank has moved in steps.
        self.bytes_moved = 0
        #: Seconds and bytes of communication after the ranks had agreed on the last step.
        self._late = StepReport()
        self._lap = perf_counter()
        self.drift = 0.0
        #: Seconds since the start by activity; waiting by the rank that was waited for.
        self._computing = self._reducing = self._meeting = 0.0
        self._waiting: dict[int, float] = {}
        self.spent = np.zeros(comm.size)
        is_split = config.stages > 1 and any(one.tied for one in parts.model.layers.values())
        count, is_asked = parts.passes.micro_batches, config.run.noise_scale
        self.noise = extras.NoiseScale(count, is_split=is_split) if is_asked else None

    def begin(self) -> None:
        """Begin an epoch: drop time and traffic since the last step, which belong to no step."""
        self._lap = perf_counter() - self._late.seconds
        self._before = self._counted()
        self._parts.gradient.met = 0.0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A block between two steps, such as a checkpoint, that belongs to neither."""
        began, counted = perf_counter(), self._counted()
        yield
        self._lap += perf_counter() - began
        self._before += self._counted() - counted

    def lap(self) -> float:
        """Seconds of this step: those since the last call, or since :meth:`begin`."""
        before, self._lap = self._lap, perf_counter()
        return self._lap - before

    def _counted(self) -> Array:
        """Bytes sent and moved in shared memory so far; the least by the MPI library."""
        traffic = self._traffic
        return np.array([traffic.sent + traffic.native_bytes, traffic.shared])

    def moved(self) -> tuple[int, int]:
        """Bytes that this rank has sent, and moved in shared memory, since the last call."""
        sent, shared = (self._counted() - self._before).tolist()
        self._before += [sent, shared]
        self.bytes_moved += sent + shared
        return sent, shared

    @contextmanager
    def late(self, name: str) -> Iterator[None]:
        """A span of communication after the ranks agreed on a step, which the next one reports."""
        before, began = self.moved(), perf_counter()
        with self._parts.span(name, "communicate"):
            yield
        seconds, moved = perf_counter() - began, self.moved()
        seconds = seconds if any(moved) else 0.0
        sent, shared = map(sum, zip(before, moved))
        more = StepReport(0.0, seconds, seconds, sent_bytes=sent, shared_bytes=shared)
        self._late = self._late.plus(more)

    def take_late(self) -> StepReport:
        """Take the seconds and bytes of :meth:`late`, which no step has reported yet."""
        late, self._late = self._late, StepReport()
        self._reducing += late.seconds
        return late

    def report(
        self,
        loss: Scalar,
        squares: Scalar,
        comm_seconds: float,
        source: MicroBatches | None,
        waited: Mapping[int, float],
    ) -> StepReport:
        """This rank's report of the step that it has computed.

        Args:
            loss, squares: this rank's part of the mean over the batch, and of the squared norm of
                the gradient.
            comm_seconds: seconds in the sum of gradients.
            source: the micro-batches; None: their labels are none of the report's.
            waited: seconds of waiting for other stages, by rank.
        """
        parts, feed = self._parts, self._parts.feed
        # The tensor ranks of the last stage all have one loss and labels; sums count these once.
        is_first = parts.grid.place.tensor == 0
        own, labels, counted = loss if is_first else 0.0, 0.0, 0.0
        if is_first and source:
            labels, counted = source.labels_taken, source.counted
        loss, squares, counted, noise = parts.device.read(
            [own, squares, counted, parts.store.squares]
        )
        memory, faults = parts.device.memory(), bool(parts.purity.faults())
        seconds = self.lap()
        parts.gradient.met += feed.met_seconds
        late = self.take_late()  # within the seconds since the last call
        met = self.add(seconds - late.seconds, comm_seconds, waited)
        sent, shared = self.moved()
        return StepReport(
            loss if parts.summation.is_finite else nan, seconds, comm_seconds + late.seconds,
            sum(waited.values()) + met, feed.read_seconds, parts.stop.raised(),
            sent + late.sent_bytes, shared + late.shared_bytes, faults, labels, counted, memory,
            noise, squares,
        )  # fmt: skip

    def together(self, act: Callable[[], T], *errors: type[Exception]) -> T:
        """As :func:`mpitrain.ranks.together.together`; seconds after ``act`` count as waiting."""
        ended = 0.0

        def timed() -> T:
            nonlocal ended
            own = act()
            ended = perf_counter()
            return own

        found = together(self._comm, timed, *errors)
        self._parts.gradient.met += perf_counter() - ended
        return found

    def add(self, seconds: float, reducing: float, waiting: Mapping[int, float]) -> float:
        """Add a step of ``seconds``, some in the sum of gradients, some ``waiting`` for ranks;
        returns those in which it has met all ranks."""
        met, self._parts.gradient.met = self._parts.gradient.met, 0.0
        for rank, part in waiting.items():
            self._waiting[rank] = self._waiting.get(rank, 0.0) + part
        computing = seconds - reducing - sum(waiting.values()) - met
        self._meeting += met
        self._reducing += reducing
        self._computing += computing
        self.spent[self._comm.rank] += computing
        return met

    def record(self, begun: Begun, agreed: Agreed) -> Step:
        """Record of a step on which all ranks agree; sums over the ranks become means."""
        if agreed.drift is not None:
            self.drift = agreed.drift
        ranks, samples, noise = self._comm.size, begun.samples, UNSET
        if self.noise:
            unscaled = (agreed.mean_factor / begun.scale) ** 2
            whole = (agreed.grad_norm / begun.scale) ** 2
            noise = self.noise.seen(samples, whole, agreed.noise_squares * unscaled)
        return Step(
            step=begun.step, epoch=begun.epoch, samples=samples, loss=agreed.loss,
            grad_norm=agreed.grad_norm / begun.scale, lr=begun.lr, seconds=agreed.seconds / ranks,
            samples_per_s=samples * ranks / agreed.seconds,
            comm_share=min(1.0, agreed.comm_seconds / agreed.seconds),
            wait_share=min(1.0, agreed.wait_seconds / agreed.seconds),
            read_share=min(1.0, agreed.read_seconds / agreed.seconds),
            sent_bytes=agreed.sent_bytes / ranks, shared_bytes=agreed.shared_bytes / ranks,
            memory=agreed.memory / ranks, sync=self.synced(begun.step), noise=noise,
        )  # fmt: skip

    def synced(self, step: int) -> Synced | UnsetType:
        """Fields of the synchronisation in a record; unset if workers synchronise in every step."""
        sync = self._parts.config.sync
        if sync.kind == "every_step":
            return UNSET
        return Synced(*sync.exchanges(step), self.drift)

    def straggler(self, step: int, spent: Array) -> Straggler | None:
        """The rank that kept the others waiting since the last call, or None.

        ``spent``: the sum of :attr:`spent` over the ranks.
        """
        self.spent[...] = 0.0
        peers, hosts, crowded = zip(*self._ranks, strict=True)
        found = slowest(spent.tolist(), peers)
        if found is None or crowded[found[0]]:
            return None
        rank, factor = found
        return Straggler(step, rank, hosts[rank], factor)

    def times(self, place: Coordinates) -> Times:
        """Time of each rank since the start, by activity; collective."""
        memory = int(HOST.memory())
        spent = self._computing, self._reducing, self._waiting, self._meeting
        return Times(self._comm.allgather(RankTime(place.stage, place.tensor, *spent, memory)))


def traffic_of(comm: Communicator) -> Traffic:
    """The counter of bytes of a communicator."""
    return comm.traffic or comm.count_traffic()


def slowest(seconds: Sequence[float], peers: Sequence[Hashable]) -> tuple[int, float] | None:
    """The rank furthest above the median of its peers, and its multiple of that median; or None."""
    scores = []
    for rank, own in enumerate(seconds):
        others = [s for r, s in enumerate(seconds) if r != rank and peers[r] == peers[rank]]
        if others and own - median(others) > _SECONDS and own > _FACTOR * median(others):
            scores.append((own / max(median(others), 1e-9), rank))
    if not scores:
        return None
    factor, rank = max(scores)
    return rank, factor
