"""The parts of a job on this rank, made from its tables and its program's own objects."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator, UnknownAlgorithm
from mpitrain import nn
from mpitrain.arrays import Array
from mpitrain.config import Config, ConfigError
from mpitrain.data import DataError, Dataset, Sampler
from mpitrain.device import Device
from mpitrain.metrics.records import Record
from mpitrain.models import SequentialModel
from mpitrain.objective import LossFunction
from mpitrain.objective.metrics import Metric
from mpitrain.optim.groups import Grouping
from mpitrain.optim.lr import Rates
from mpitrain.optim.optimizers import Optimizer
from mpitrain.optim.schedule_table import Factor, TabulatedSchedule
from mpitrain.parallel.arena import SPREAD, Arena
from mpitrain.parallel.grid import ProcessGrid
from mpitrain.parallel.precision import LossScale
from mpitrain.parallel.replicas import ReplicaMismatch, check_replicas
from mpitrain.parallel.store import Store, overlaps
from mpitrain.parallel.summation import Summation
from mpitrain.pipeline.runtime import Span
from mpitrain.ranks.same import expect_same
from mpitrain.ranks.stop import StopFlag
from mpitrain.ranks.together import SharedError
from mpitrain.training.account import Account
from mpitrain.training.early_stopping import MeasuredRates, Watch
from mpitrain.training.feed import Feed
from mpitrain.training.partition import Partition
from mpitrain.training.passes import Passes
from mpitrain.training.purity import Purity
from mpitrain.training.strategy import Strategy
from mpitrain.update.agreement import Diverged
from mpitrain.update.gradient import GlobalGradient
from mpitrain.update.updater import Updater

if TYPE_CHECKING:
    from mpitrain.training.padding import Padding
    from mpitrain.training.spikes import Spikes

#: Errors that a step, a test or the making of parts raises on all ranks or on none.
SHARED_ERRORS: tuple[type[Exception], ...] = (
    ConfigError, DataError, Diverged, ReplicaMismatch, UnknownAlgorithm, SharedError,
)  # fmt: skip


@dataclass(frozen=True)
class UserObjects:
    """The program's own objects, in the place of the job's tables; ``None``: the table counts.

    Attributes:
        data: replaces [data].
        layers: replace [model], by name.
        loss: replaces [loss].
        metrics: replace ``evaluate.metrics``, by name.
        optimizer: replaces [optim] except for the rate and its schedule.
        grouping: gives the update rule of a parameter by its name.
        schedule: replaces ``optim.schedule`` and its warm-up: ``schedule(step)`` is the
            factor on the scaled rate, as in torch's LambdaLR.  Steps count from 0; they are epochs
            with ``optim.schedule_by = "epoch"``.  Rank 0 calls it for all steps before the first.
        shadow: function that rank 0 calls with the parts and each of the first batches, to compare
            its step with that of plain torch.
        names: name of a tensor here, by its name in the torch module's ``state_dict``.
        clients: the client of each training sample, or a function of the data that gives them.
    """

    data: Dataset | None = None
    layers: Mapping[str, nn.Layer] | None = None
    loss: LossFunction | None = None
    metrics: Mapping[str, Metric] | None = None
    optimizer: Optimizer | None = None
    grouping: Grouping | None = None
    schedule: Factor | TabulatedSchedule | None = None
    shadow: Callable[["Parts", Any], None] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    clients: Any = None


#: No objects: the tables of the job name everything.
NO_OBJECTS = UserObjects()


@dataclass
class Asked:
    """Wishes of the program's function that sees the records.

    Attributes:
        end: reason to end training after the last step; empty: it goes on.
        save: whether a checkpoint of the last step is wanted.
        factor: factor on the rates of all steps to come.
        attributes: attributes of the module that were set, by name.
        seen: record with which the function runs now; None: it does not run.
    """

    end: str = ""
    save: bool = False
    factor: float = 1.0
    attributes: dict[str, object] = field(default_factory=dict)
    seen: Record | None = None

    def expect_open(self) -> None:
        """Raise RuntimeError unless the function runs now: nobody would see what is asked."""
        if self.seen is None:
            raise RuntimeError(
                "end(), save() and rate_factor act while on_record= of fit() is called; ask there"
            )

    def set_end(self, reason: str) -> None:
        """Ask for the end of training; ValueError: there is no reason."""
        self.expect_open()
        if not reason:
            raise ValueError("end: give a reason, which the summary shows")
        self.end = str(reason)

    def set_factor(self, factor: float) -> None:
        """Ask for another factor on the rates; ValueError: it is no finite number from 0 on."""
        self.expect_open()
        if not (isfinite(factor) and factor >= 0):
            raise ValueError(f"rate_factor: a finite number from 0 on, not {factor!r}")
        self.factor = float(factor)

    def agree(self, comm: MPI.Intracomm, *, gathers: bool = False) -> None:
        """Raise ConfigError on all ranks unless they ask for the same; collective, 16 bytes.

        ``gathers``: the program wants the values of training, and has not asked for all yet.
        """
        told: dict[str, object] = {"gather()": gathers}
        if not gathers:
            told |= {"end()": self.end, "save()": self.save, "rate_factor": self.factor}
            told |= self.attributes
        expect_same(comm, {f"{key} in on_record": one for key, one in told.items()})


@dataclass
class Parts:
    """A job on this rank: its data, its share of the model, and its progress.

    All methods are collective.  The class of each part describes it; besides:

    Attributes:
        comm: all ranks of the job.
        data: training and test samples, the same on all ranks.
        layout: description of the layout, for reports.
        model: the whole model; this rank has :attr:`layers`, by name, in the :attr:`arena`.
        metrics: metrics of tests, by name.
        span: context manager that records an activity in the trace.
        before_step: called with the parts before each step.
        opened: closes everything at the end, in reverse order of opening.
        measured_rates: sets rates by tests; None: rates do not follow tests.
        strategy: exchanges of workers that train by themselves; None: they share each gradient.
        counting: ranks whose counts divide the gradients *before* these are summed, as they are
            coded, pushed or changed then; ``None``: what counts is known with the step's report, or
            the loss is a mean over all labels.
        spikes: comparison of losses, if ``run.on_spike`` asks for it.
        padding: check that padding has no part in results; None: samples are alike.
        steps_done: steps since the beginning, skipped ones included.
        epoch, seen: the place in training: the epoch of the next step, and its samples before that.
        stopping: whether a rank was asked to stop; the same on all ranks.
        ending: reason for which the program ends training; the same on all ranks.
        updates_per_step: largest number of updates in a step since the beginning.
        origin: see :func:`mpitrain.checkpoint.changes.origin_of`; None before the first call.
        prox: FedProx's mu of the next round, the last round's loss, and the rounds in which it has
            fallen until then; empty without clients.
        over: reason for which no pass is possible any more; empty: it is.
    """

    comm: Communicator
    config: Config
    objects: UserObjects
    device: Device
    span: Span
    stop: StopFlag
    before_step: Callable[["Parts"], None]
    opened: ExitStack
    data: Dataset = field(init=False)
    data_digest: str = field(init=False)
    sampler: Sampler = field(init=False)
    rates: Rates = field(init=False)
    grid: ProcessGrid = field(init=False)
    layout: str = field(init=False)
    partition: Partition = field(init=False)
    model: SequentialModel = field(init=False)
    layers: list[str] = field(init=False)
    arena: Arena = field(init=False)
    metrics: Mapping[str, Metric] = field(init=False)
    watch: Watch = field(init=False)
    measured_rates: MeasuredRates | None = field(init=False)
    store: Store = field(init=False)
    gradient: GlobalGradient = field(init=False)
    updater: Updater = field(init=False)
    strategy: Strategy | None = None
    counting: Communicator | None = None
    passes: Passes = field(init=False)
    purity: Purity = field(init=False)
    spikes: "Spikes | None" = None
    padding: "Padding | None" = None
    feed: Feed = field(init=False)
    account: Account = field(init=False)
    scale: LossScale = field(init=False)
    asked: Asked = field(default_factory=Asked)
    steps_done: int = 0
    epoch: int = 0
    seen: int = 0
    stopping: bool = False
    ending: str = ""
    updates_per_step: int = 1
    origin: Any = None
    prox: list[float] = field(default_factory=list)
    over: str = ""

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.rates.total_steps

    def count_steps(self, first: int, samples: Sequence[Sized]) -> None:
        """Count the steps from ``first`` on, each of which has taken some samples."""
        self.steps_done = first + len(samples)
        self.epoch, rest = divmod(self.steps_done - self.rates.ahead, self.sampler.steps_per_epoch)
        self.seen = self.seen + sum(map(len, samples)) if rest else 0

    @property
    def shadows(self) -> bool:
        """Whether the next step is compared with plain torch, if the model is torch's."""
        config = self.config
        apart = config.server.ranks or config.server.hogwild or config.federated.clients
        return self.steps_done < config.run.shadow and not apart and bool(config.own.model)

    @property
    def summation(self) -> Summation:
        """The summation of gradients over replicas."""
        return self.store.reduction.summation

    @property
    def state(self) -> Mapping[str, Array]:
        """State of this rank's layers besides parameters, by name."""
        return self.passes.state

    @property
    def dense_bytes(self) -> float:
        """Least number of bytes that a rank must send to sum its gradients without a codec."""
        size = self.grid.data.size - self.config.server.ranks
        itemsize = np.dtype(self.config.run.dtype).itemsize
        spread = sum(t.stop - t.start for t in self.arena.tensors if t.group == SPREAD)
        alike = self.grid.groups[SPREAD].size
        sent = (size - 1) / size * (self.arena.size - spread) + (alike - 1) / alike * spread
        return 2 * sent * itemsize * self.updater.per_step

    def whole(self, of: Callable[[int], Array], *, everywhere: bool = False) -> dict[str, Array]:
        """Whole arrays by tensor, on rank 0 or ``everywhere``; a piece ``n`` here has ``of(n)``."""
        found: dict[str, Array] = {}
        own = [
            (tensor, piece.start + part.start - tensor.start, self.device.get(of(number)[part]))
            for number, piece in enumerate(self.store.pieces)
            if self.grid.owns(piece.group)
            for tensor, part in overlaps(self.arena.tensors, piece, self.store.owned(piece))
        ]
        every = self.comm.allgather(own) if everywhere else self.comm.gather(own)
        for tensor, first, values in chain.from_iterable(every or ()):
            into = found.setdefault(tensor.name, np.zeros(tensor.whole, values.dtype))
            index = tensor.part(np.arange(into.size).reshape(into.shape)).ravel()
            into.flat[index[first : first + values.size]] = values
        return found

    def refresh(self) -> None:
        """Show new values of this rank's pieces to all ranks."""
        self.store.publish()
        self.passes.forget_rounded()

    def drain(self) -> None:
        """Give all replicas the same weights, at the end of a run; tests and checkpoints do not."""
        if self.strategy:
            self.strategy.drain()
        self.refresh()

    def check_replicas(self, when: str) -> None:
        """Compare what several ranks hold, bit by bit; ReplicaMismatch on all ranks if unequal."""
        # If workers train by themselves, only the ranks of one worker hold the same values.
        groups = self.store.reduction.groups if self.strategy else self.grid.groups
        replicas = self.updater.replicas(groups)
        if self.state and self.grid.data.size > 1:
            replicas.append((self.grid.data, dict(self.state)))
        if self.strategy:
            anchors = {
                f"{name} of {tensor.name}": flat[tensor.start : tensor.stop]
                for name, flat in self.strategy.shared.items()
                for tensor in self.arena.tensors
            }
            replicas.append((self.grid.data, anchors))
        check_replicas(self.comm, replicas, when)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Passes, after an error in which ranks may wait for sums, or have them twice."""
        try:
            yield
        except BaseException:
            if self.comm.size > 1 or self.config.parallel.zero > 1:
                self.over = "has failed in a pass, and may have half of its sums"
            raise

    def expect_open(self) -> None:
        """Raise RuntimeError if the parts are closed, or a pass has failed."""
        if self.over:
            raise RuntimeError(f"this trainer {self.over}; fit(resume=True) of another one goes on")

    def close(self) -> None:
        """Free the communicators; a second call does nothing."""
        self.over = "is closed, and has no communicators"
        self.opened.close()
