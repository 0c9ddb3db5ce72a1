"""Time and traffic of the steps on this rank, and the records of steps, equal on all ranks."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from time import perf_counter

from msgspec import UNSET, UnsetType

from collectives import Communicator
from mpitrain.arrays import Scalar
from mpitrain.config import Sync
from mpitrain.metrics import Step, Straggler, Synced, Times
from mpitrain.parallel.grid import Coordinates
from mpitrain.step.agreement import Agreed, Told
from mpitrain.step.ledger import Noted
from mpitrain.sync import Strategy
from mpitrain.training.feed import Feed
from mpitrain.training.stragglers import Busy


class Account:
    """Measures the seconds and bytes of each step.

    Attributes:
        busy: time of this rank by activity: computing, communicating, waiting.
    """

    def __init__(
        self, comm: Communicator, strategy: Strategy, *, peers: Hashable, sync: Sync
    ) -> None:
        """All sums begin at 0.

        Args:
            comm: all ranks.
            strategy: decides when workers synchronise.
            peers: ranks with equal values have the same amount of work.
            sync: unless workers synchronise in every step, records show when they do.
        """
        self._comm = comm
        self._peers = peers
        self._strategy = strategy
        self._sync = sync
        self._traffic = comm.traffic or comm.count_traffic()
        self._before = self._traffic.sent, self._traffic.shared
        #: Bytes moved after the ranks had agreed on the last step; pair as from :meth:`moved`.
        self._late = 0, 0
        self._lap = self._told = perf_counter()
        self._drift = 0.0
        self.busy = Busy()

    def begin(self) -> None:
        """Begin an epoch: drop time and traffic since the last step, which belong to no step."""
        self._lap = perf_counter() - self.busy.published
        self.moved()
        self.busy.begin()

    def moved(self) -> tuple[int, int]:
        """Bytes that this rank has sent, and moved in shared memory, since the last call."""
        now, before = (self._traffic.sent, self._traffic.shared), self._before
        self._before = now
        return now[0] - before[0], now[1] - before[1]

    def ended(self, seconds: float) -> None:
        """Note ``seconds`` of communication after the ranks agreed on a step, such as an exchange.

        The next step reports these seconds and the bytes of that communication.
        """
        self.busy.published, self._late = seconds, self.moved()

    def settled(self, told: Told) -> Told:
        """The report of the last step with the seconds and bytes that :meth:`ended` noted added."""
        seconds, (sent, shared) = self.busy.settle(), self._late
        self._late = 0, 0
        return replace(
            told,
            seconds=told.seconds + seconds,
            comm_seconds=told.comm_seconds + seconds,
            sent_bytes=told.sent_bytes + sent,
            shared_bytes=told.shared_bytes + shared,
        )

    def tell(
        self,
        loss: Scalar,
        comm_seconds: float,
        waited: Mapping[int, float],
        feed: Feed,
        *,
        stopping: bool,
        faulty: bool,
    ) -> Told:
        """This rank's report of the step that it has computed; call :meth:`met` afterwards.

        Args:
            loss: this rank's part of the mean over the batch.
            comm_seconds: seconds in the sum of gradients.
            waited: seconds of waiting for activations, by the rank that sends them.
            feed: reader of the samples.
            stopping, faulty: see :class:`~mpitrain.step.agreement.Told`.
        """
        self._told = perf_counter()
        seconds = self._told - self._lap
        self.busy.met += feed.met_seconds
        self.busy.add(seconds, comm_seconds, waited)
        comm_seconds += self.busy.published
        waiting = sum(waited.values()) + self.busy.met
        strayed = self._strategy.strayed
        sent, shared = (late + now for late, now in zip(self._late, self.moved()))
        return Told(
            loss, seconds, comm_seconds, waiting, feed.read_seconds, stopping, sent, shared,
            faulty, strayed,
        )  # fmt: skip

    def met(self) -> None:
        """Note that the ranks have agreed on the step: from now on the next step's time runs."""
        self.busy.met = perf_counter() - self._told
        self._lap = self._told

    def record(self, noted: Noted, agreed: Agreed, grad_norm: float) -> Step:
        """Record of a step on which all ranks agree; sums over the ranks become means."""
        if agreed.drift is not None:
            self._drift = agreed.drift
        ranks, samples = self._comm.size, noted.samples
        return Step(
            step=noted.step,
            epoch=noted.epoch,
            samples=samples,
            loss=agreed.loss,
            grad_norm=grad_norm,
            lr=noted.lr,
            seconds=agreed.seconds / ranks,
            samples_per_s=samples * ranks / agreed.seconds,
            comm_share=min(1.0, agreed.comm_seconds / agreed.seconds),
            wait_share=min(1.0, agreed.wait_seconds / agreed.seconds),
            read_share=min(1.0, agreed.read_seconds / agreed.seconds),
            sent_bytes=agreed.sent_bytes / ranks,
            shared_bytes=agreed.shared_bytes / ranks,
            sync=self.synced(noted.step),
        )

    def synced(self, step: int) -> Synced | UnsetType:
        """Fields of the synchronisation in a record; unset if workers synchronise in every step."""
        if self._sync.kind == "every_step":
            return UNSET
        taken = [list(one) for one in self._strategy.taken]
        return Synced(*self._sync.exchanges(step), self._drift, taken)

    def straggler(self, step: int) -> Straggler | None:
        """The rank that kept the others waiting since the last call, or None; collective."""
        return self.busy.slowest(self._comm, self._peers, step)

    def times(self, place: Coordinates) -> Times:
        """Time of each rank since the start, by activity; collective."""
        return self.busy.times(self._comm, place.stage, place.tensor)
