"""The parts of a job on these ranks: data, layout, model, parameters, pipeline."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from mpi4py import MPI

from collectives import CheckedTransport, Communicator, UnknownAlgorithm
from collectives.failure.abort import aborts
from mpitrain import models, nn
from mpitrain.arrays import Array
from mpitrain.config import Config, ConfigError, expect
from mpitrain.data import DataError, Dataset, Sampler, load
from mpitrain.data.everywhere import load_on_all
from mpitrain.data.own import Own
from mpitrain.data.stream import Streamed
from mpitrain.device import HOST, Device, choose
from mpitrain.group import TensorGroup
from mpitrain.metrics import Overlap
from mpitrain.objective import Loss
from mpitrain.objective.metrics import Metric
from mpitrain.optim import groups, schedule_table
from mpitrain.optim.groups import Grouping
from mpitrain.optim.lr import Rates
from mpitrain.optim.optimizers import Optimizer
from mpitrain.optim.schedule_table import Factor, TabulatedSchedule
from mpitrain.parallel.arena import Arena
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.parallel.grid import ProcessGrid, shared_name
from mpitrain.parallel.overlap_trial import OverlapTrial
from mpitrain.parallel.replicas import ReplicaMismatch, check_replicas
from mpitrain.parallel.store import Store
from mpitrain.pipeline.runtime import Span, no_span
from mpitrain.ranks.same import described, expect_same, expect_same_job
from mpitrain.ranks.stop import StopFlag
from mpitrain.ranks.together import ClosedTogether, all_here, all_or_nobody, together
from mpitrain.step.agreement import NonFinite
from mpitrain.step.gradient import GlobalGradient
from mpitrain.step.ledger import Ledger
from mpitrain.step.precision import LossScale
from mpitrain.step.trust import TrustRatios
from mpitrain.step.update import Updater
from mpitrain.sync import EveryStep, Strategy, Workers
from mpitrain.sync.workers import layer_numbers
from mpitrain.training import build
from mpitrain.training.account import Account
from mpitrain.training.feed import Feed
from mpitrain.training.fitting import (
    expect_fitting,
    expect_labels,
    expect_labels_in_memory,
    expect_single_arrays,
    expect_untested,
    initial,
    named_metrics,
    whole_state,
)
from mpitrain.training.passes import Passes
from mpitrain.training.purity import Purity
from mpitrain.training.watch import Watch


class Placed(ClosedTogether):
    """A job, placed: each rank has its layers, their parameters and what is bound to communicators.

    Use it in a ``with`` statement, or call :meth:`close`.  All methods are collective.

    Attributes:
        config: the job.
        device: where its arrays are.
        grid: who does what.
        data: what is trained and tested on, the same on all ranks.
        data_digest: digest of the data.
        sampler: the order of samples.
        rates: of the steps.
        model: all of it, of which this rank has :attr:`layers`.
        layers: names of the own layers.
        store: their parameters and gradients.
        summation: how gradients are summed over replicas.
        strategy: when replicas talk.
        state: what they keep besides, by name.
        passes: what takes micro-batches through them.
        purity: whether what the program brings behaves as pure functions do.
        gradient: of all ranks, of which this one has a part.
        updater: how parameters follow it.
        partition: which layers each stage has.
        watch: what tests have shown so far.
        span: records what is done when.
        given: what the program brings, by name.
        names: of each entry of a torch module's ``state_dict``, the name of its tensor here.
        recipe: what else decides on the numbers, once a checkpoint asks for it.
        steps_done: steps since the beginning, those that were skipped included.
        account: what the steps cost this rank, and their records.
        stop: asks this rank to stop after a step.
        stopping: whether a rank was asked to stop; all ranks know.
        updates_per_step: updates of the parameters in a step, at most, since the beginning.
    """

    #: Whether it is for jobs with servers.
    serves: ClassVar[bool] = False
    #: Whether it is for jobs with clients.
    federates: ClassVar[bool] = False
    #: What its methods raise on all ranks or on none.
    shared_errors: ClassVar[tuple[type[Exception], ...]] = (
        ConfigError, DataError, NonFinite, ReplicaMismatch, UnknownAlgorithm,
    )  # fmt: skip

    def __init__(
        self,
        comm: MPI.Intracomm,
        config: Config,
        *,
        span: Span = no_span,
        stop: StopFlag | None = None,
        data: Dataset | None = None,
        layers: Mapping[str, nn.Layer] | None = None,
        loss: Loss | None = None,
        metrics: Mapping[str, Metric] | None = None,
        optimizer: Optimizer | None = None,
        grouping: Grouping | None = None,
        schedule: Factor | TabulatedSchedule | None = None,
        before_step: Callable[[Any], None] | None = None,
        device: Device | None = None,
    ) -> None:
        """Load the data, initialise the parameters from the seed, bind the communication.

        Args:
            comm: as many ranks as the job's layout has; one of plain mpi4py becomes a
                :class:`collectives.Communicator`.
            config: the job.
            span: records what is done when.
            stop: asks to stop after a step.
            data, layers, loss, metrics, optimizer: one's own, in the place of what the [data],
                [model], [loss], [evaluate] and [optim] tables name.  Data, and the values that
                layers bring, are the same on all ranks, which is checked.
            grouping: how each parameter is updated, by its name; without, as ``optim.groups`` says.
            schedule: one's own, in the place of ``optim.schedule`` and ``optim.warmup_epochs``:
                ``schedule(step)`` is what the scaled rate is multiplied by in a step, counted from
                0, as of torch's LambdaLR, with ``optim.schedule_by = "epoch"`` in an epoch.  Rank 0
                calls it for all steps of the run, before the first one.
            before_step: called before each step, on each rank.
            device: where arrays are; by default, as ``run.device`` says.

        Raises:
            ConfigError: on all ranks: they have different jobs (:mod:`mpitrain.ranks.same`), a
                value of the job does not fit the data, the ranks or the memory, or the model's
                outputs do not fit the loss.
            DataError: on all ranks: one of them cannot read the data, or has other samples.
            ReplicaMismatch: on all ranks, if ``layers`` bring different values.
            collectives.UnknownAlgorithm: an option of the all-reduce does not fit the ranks.
        """
        #: What is closed in the end, the last one first.
        self._opened = ExitStack()
        self._is_closed = False
        expect_same_job(
            comm,
            config,
            {
                "layers": None if layers is None else list(layers),
                "metrics": None if metrics is None else list(metrics),
                "loss": None if loss is None else type(loss).__name__,
                **described(optimizer),
                "schedule": schedule is not None,
            },
        )
        self.comm = self._own(comm)
        self.config = config
        self.span = span
        self.stop = stop or StopFlag()
        self.stopping = False
        self.steps_done = 0
        self.updates_per_step = 1
        self.given = {"model": layers, "loss": loss, "metrics": metrics}
        self.names: Mapping[str, str] = {}
        self.recipe: Any = None
        self._layers = layers
        self._loss = loss
        self._optimizer = optimizer or build.optimizer(config.optim)
        self._grouping = grouping
        self._before_step = before_step
        with self._closed_if_refused():
            self._expect_kind()
            self.comm.watch()
            # Before plans are made, which count from then on.
            self._traffic = self.comm.traffic or self.comm.count_traffic()
            self.device = device or choose(config, self.comm)
            self._load(data, metrics, schedule)
            self._bind(metrics)

    def _own(self, comm: MPI.Intracomm) -> Communicator:
        """The ranks' messages; what is made here is closed in the end."""
        found = comm if isinstance(comm, Communicator) else Communicator(comm)
        if found is not comm:
            self._opened.callback(found.close)
        return found

    @contextmanager
    def _closed_if_refused(self) -> Iterator[None]:
        """What all ranks refuse is closed; an error of one rank alone ends the job, or, where it
        must not, leaves open what is closed by all ranks together."""
        try:
            with all_or_nobody(self.comm):
                yield
        except MPI.Exception:
            raise
        except Exception:  # whatever a program's own layers raise
            if aborts() or all_here(self.comm):
                self.close()
            raise

    def _expect_kind(self) -> None:
        """The job is one for this class, and for these ranks' messages."""
        config = self.config
        if config.federated.clients and not self.federates:
            raise ConfigError(
                f"federated.clients = {config.federated.clients}: mpitrain.federated.Trainer and "
                "mpitrain train have clients; set it to 0 here"
            )
        if self.comm.delays_messages:
            expect(config, "link")
        if config.parallel.checksums and not self.comm.checks_messages:
            self.comm = Communicator(self.comm, transport=CheckedTransport)
            self._opened.callback(self.comm.close)
        if bool(config.server.ranks or config.server.hogwild) != self.serves:
            raise ConfigError(
                "server: a job with servers is trained by mpitrain.server.ServedTrainer, one with "
                "hogwild by HogwildTrainer, and no other job is"
            )

    def _load(
        self,
        data: Dataset | None,
        metrics: Mapping[str, Metric] | None,
        schedule: Factor | TabulatedSchedule | None,
    ) -> None:
        """The data, the order of samples, and the rate of each step."""
        config = self.config
        self.data, self.data_digest = load_on_all(
            self.comm, lambda: data or load(config.data, config.run.dtype), config.data.path
        )
        if self.data.test is None:
            expect_untested(config, metrics)
        samples = len(self.data.train)
        if config.train.batch_size > samples:
            raise ConfigError(
                f"train.batch_size = {config.train.batch_size} must be at most {samples}, the "
                "number of training samples"
            )
        self.sampler = Sampler(
            samples,
            config.train.batch_size,
            config.run.seed,
            shuffles=not isinstance(self.data.train, Streamed),
        )
        per_epoch = self.sampler.steps_per_epoch
        table = schedule_table.agreed(
            self.comm, config.optim, schedule, per_epoch, self.total_steps
        )
        self.rates = Rates(config.optim, config.train, per_epoch, table)

    def _bind(self, metrics: Mapping[str, Metric] | None) -> None:
        """Make what is bound to communicators; collective."""
        config = self.config
        self._open_grid()
        self.metrics = (
            metrics
            if metrics is not None
            else named_metrics(
                config, self.data, self.model, self._outputs, own_loss=self._loss is not None
            )
        )
        self.watch = Watch(config, self.metrics)
        self._place_parameters()
        self._bind_pipeline()
        synchronises = config.sync.kind != "every_step"
        self.account = Account(self.comm, self.strategy, synchronises=synchronises)
        self.scale = LossScale(
            config.run.loss_scale,
            config.run.loss_scale_window,
            enabled=config.run.compute == "float16",
        )
        self._trial = self._begin_trial()
        self._found_overlap: Overlap | None = None
        #: How many gradients there are; each is of its worker's samples, as many times larger.
        self._workers = self.grid.layout.replicas[0] if config.sync.drifts else 1
        #: Steps of workers that tell each other of them later.
        self._ledger: Ledger | None = None
        if config.sync.agree > 1:
            self._ledger = Ledger(self.comm, self._workers, config.sync.agree)

    def _open_grid(self) -> None:
        layout = build.layout(self.config, self.comm.size)

        def outlined() -> None:
            outline = models.build(self.config, self.data, layers=self._layers, loss=self._loss)
            self._outputs = expect_fitting(outline, self.data)
            expect_labels_in_memory(outline.loss, self.data)
            # By a profile, each rank reads its own file.
            self.partition = build.partition(self.config, outline, layout.stages)
            self._shared = build.shared_stages(outline, self.partition)

        together(self.comm, outlined, ConfigError, DataError)
        if self.config.parallel.partition == "auto":
            expect_same(self.comm, {"the partition by parallel.profile": self.partition.layers})
        self.grid = ProcessGrid(self.comm, layout, self._shared.values(), self.device.xp)
        self._opened.callback(self.grid.close)
        self.model = models.build(
            self.config,
            self.data,
            self.grid.tensor,
            self._spread(),
            self._layers,
            self._loss,
        )
        if self.device is not HOST:
            expect_single_arrays(self.model, self.data)
        if any(layer.holds for layer in self.model.layers.values()):
            expect(self.config, "torch")
        brought = nn.Chain(self.model.layers).brought()
        check_replicas(self.comm, [(self.comm, brought)], "in the layers that they were given")

    def _spread(self) -> TensorGroup:
        """The ranks over which embedding tables are spread."""
        return TensorGroup(self.grid.data)

    def _place_parameters(self) -> None:
        config, stage = self.config, self.grid.place.stage
        chunks = self.partition.of_stage(stage)
        self.layers = [name for chunk in chunks for name in chunk]
        self.arena = Arena(
            {name: self.model.layers[name] for name in self.layers},
            self.model.shapes(self.layers),
            self.grid.tensor,
            {n: shared_name(stages) for n, stages in self._shared.items() if stage in stages},
            self._spread(),
        )
        flat = together(
            self.comm,
            lambda: initial(config.run, self.model, self.arena, self.layers),
            ConfigError,
        )
        self._column: Communicator | None = None
        self.store = self._hold(self.device.put(flat))
        self._opened.callback(self.store.close)
        folder = config.parallel.offload
        offload = build.mapped(Path(folder), self.comm.rank) if folder else None
        grouping = self._grouped()
        self.gradient = GlobalGradient(self.grid, self.store, self._column, self.device)
        trust = TrustRatios(self.grid, self.store, self._column, self.device)
        self.updater = together(
            self.comm,
            lambda: Updater(
                self.store, self._optimizer, grouping, trust, offload, config.optim.average
            ),
            ConfigError,
        )
        self.strategy = self._strategy()
        self._opened.callback(self.strategy.close)
        self._opened.callback(self.strategy.quiesce)

    def _strategy(self) -> Strategy:
        config, store = self.config, self.store
        if not isinstance(store, Replicated) or config.sync.kind == "every_step":
            return EveryStep()  # the configuration has refused other stores
        may_fail = config.data.workers > 0 or isinstance(self.data.train, Own)
        if config.sync.kind == "quorum" and self.comm.allreduce(may_fail, MPI.LOR):
            expect(config, "own-data")
        replica = self.grid.place.replica
        workers = Workers(
            comm=self.grid.data,
            arena=self.arena,
            layer_of=layer_numbers(self.model),
            layers=len(self.model.layers),
            parameters=store.parameters,
            gradients=store.gradients,
            pieces=store.pieces,
            state=self.updater.state,
            counted=self.gradient.counted(),
            summation=lambda: build.summation(config, replica),
            dense=build.dense(config),
            agrees_late=config.sync.agree > 1,
            never_used=lambda: self.updater.never_used(frozenset(self.updater.left_out)),
        )
        found = build.strategy(config, workers)
        store.algorithm, store.reason = found.algorithm, found.reason
        return found

    def _hold(self, flat: Array) -> Store:
        """What holds the parameters, which begin as ``flat``."""
        summed, replica = self.grid.groups, self.grid.place.replica
        allocate = self.device.allocate(self.grid.data)
        why = ""
        if self.config.sync.kind != "every_step":
            summed, self._column = self.grid.within()
        if self.config.compress.codec == "auto":
            self.config, why = build.choose_codec(
                self.comm, self.config, summed, self.arena, replica, allocate
            )
        how = build.summation(self.config, replica)
        together(self.comm, lambda: how.check(self.arena), ConfigError)
        reduction = build.reduction(self.config, summed, replica)
        self.summation = reduction.summation
        store = build.store(self.config, self.arena, flat, reduction, allocate)
        if why:
            store.reason = f"{store.reason}; compress.codec = 'auto' is {why}"
        return store

    def _grouped(self) -> Grouping:
        """How each parameter is updated."""
        names = self.model.names()
        found = self._grouping or groups.by_name(self.config.optim, self._optimizer, names)
        table = self.rates.table
        if table and table.options is not None:
            found = groups.scheduled(found, table)
        return found

    def _bind_pipeline(self) -> None:
        config, grid = self.config, self.grid
        whole = whole_state(config, self.model, grid.layout)
        mine = tuple(f"{name}." for name in self.layers)
        self.state = {n: self.device.put(v) for n, v in whole.items() if n.startswith(mine)}
        self.passes = Passes(
            grid,
            config,
            self.data,
            self.model,
            self.partition,
            self.store,
            self.state,
            self.span,
            self.device,
        )
        self.purity = Purity(
            self.comm, self.model.layers, self.layers, self.model.loss, self.metrics
        )
        self.purity.examine(self.passes.probes())
        self.passes.runner()
        self.feed = Feed(
            self.comm,
            self.data,
            workers=config.data.workers,
            most=config.train.batch_size,
            reads=grid.place.stage in (0, grid.layout.stages - 1),
            expect=partial(expect_labels, self.model.loss),
        )
        self._opened.callback(self.feed.close)

    @property
    def layout(self) -> str:
        """How the ranks are arranged, for people."""
        return str(self.grid.layout)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        train = self.config.train
        every = train.epochs * self.sampler.steps_per_epoch
        return min(train.steps, every) if train.steps else every

    def refresh(self) -> None:
        """The pieces' parameters were replaced: all ranks see them now."""
        self.store.publish()
        self.passes.forget()

    def _begin_trial(self) -> OverlapTrial | None:
        """Of ``parallel.overlap = "auto"``, if a rank has sums that could overlap; collective."""
        parallel = self.config.parallel
        if parallel.overlap != "auto" or parallel.schedule == "asynchronous":
            return None
        if self.config.sync.kind != "every_step":  # sums inside of a worker alone
            return None
        overlaps = self.comm.allreduce(self.store.set_overlap(True), MPI.LOR)
        return OverlapTrial() if overlaps else None

    def expect_open(self) -> None:
        """Raises RuntimeError: it is closed."""
        if self._is_closed:
            raise RuntimeError("this trainer is closed, and has no communicators; make another one")

    def close(self) -> None:
        """Free what was bound to communicators; a second call does nothing."""
        self._is_closed = True
        self._opened.close()
