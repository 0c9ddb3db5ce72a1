"""Make the :class:`Parts` of a job on this rank."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypedDict, Unpack

from mpi4py import MPI
from msgspec.structs import replace

from collectives import Communicator
from collectives.extras import CheckedTransport
from collectives.failure import aborts
from mpitrain import extras, models
from mpitrain.arrays import Shape
from mpitrain.config import Config, ConfigError, expect
from mpitrain.data import DataError, Sampler, load
from mpitrain.data.everywhere import expect_same_order, load_on_all
from mpitrain.device import Device, choose
from mpitrain.group import TensorGroup
from mpitrain.optim import groups
from mpitrain.optim.lr import Rates
from mpitrain.parallel.arena import Arena
from mpitrain.parallel.data_parallel import WholeGradients
from mpitrain.parallel.grid import ProcessGrid, shared_name
from mpitrain.parallel.precision import LossScale
from mpitrain.parallel.replicas import check_replicas
from mpitrain.pipeline.runtime import Span, no_span
from mpitrain.ranks.same import described, expect_same, expect_same_job
from mpitrain.ranks.stop import StopFlag
from mpitrain.ranks.together import all_here, all_or_nobody, together
from mpitrain.training import build
from mpitrain.training.account import Account, traffic_of
from mpitrain.training.compatibility import (
    expect_fitting,
    expect_untested,
    expect_values_in_memory,
    initial,
    named_metrics,
    whole_state,
)
from mpitrain.training.early_stopping import Watch, measured_rates
from mpitrain.training.feed import Feed
from mpitrain.training.partition import (
    Partition,
    layout_of,
    partition_of,
    shared_stages,
)
from mpitrain.training.parts import NO_OBJECTS, Parts, UserObjects
from mpitrain.training.passes import Passes
from mpitrain.training.purity import Purity
from mpitrain.update.gradient import GlobalGradient
from mpitrain.update.updater import Updater


class Hooks(TypedDict, total=False):
    """Objects that a caller of :func:`assemble` may give besides the job and the program's own.

    Attributes:
        span: context manager that records an activity in the trace.
        stop: flag that asks to stop after a step.
        before_step: function that each rank calls with the parts before each step.
        device: device of the arrays; by default the one that ``run.device`` names.
    """

    span: Span
    stop: StopFlag | None
    before_step: Callable[[Parts], None] | None
    device: Device | None


def assemble(
    comm: MPI.Intracomm,
    config: Config,
    objects: UserObjects = NO_OBJECTS,
    **hooks: Unpack[Hooks],
) -> Parts:
    """Load the data, initialise the parameters from the seed, set up communication; collective.

    Args:
        comm: the job's ranks; a communicator of mpi4py becomes a
            :class:`collectives.Communicator`.
        config: the job.
        objects: the program's own objects.  A check ensures that all ranks have the same data and
            the same values in layers.
        hooks: see :class:`Hooks`.

    Raises:
        ConfigError: on all ranks: their jobs differ (:mod:`mpitrain.ranks.same`), a value of the
            job does not fit the data, the ranks or the memory, or the model's outputs do not fit
            the loss.
        DataError: on all ranks: a rank cannot read the data, or has other samples.
        ReplicaMismatch: on all ranks: values in layers differ between ranks.
        collectives.UnknownAlgorithm: an option of the all-reduce does not fit the ranks.
    """
    opened = ExitStack()
    _expect_same(comm, config, objects)
    if not isinstance(comm, Communicator):
        comm = Communicator(comm)
        opened.callback(comm.close)
    with closed_if_refused(comm, opened):
        comm = _with_checksums(comm, config, opened)
        comm.watch()
        traffic_of(comm)  # before plans are made, as earlier ones do not count
        parts = Parts(
            comm, config, objects, hooks.get("device") or choose(config, comm),
            hooks.get("span", no_span), hooks.get("stop") or StopFlag(),
            hooks.get("before_step") or (lambda parts: None), opened,
        )  # fmt: skip
        _add_samples(parts)
        _add_model(parts)
        _add_update(parts)
        _add_pipeline(parts)
    return parts


@contextmanager
def closed_if_refused(comm: Communicator, opened: ExitStack) -> Iterator[None]:
    """Close ``opened`` after an error that all ranks raise; collective.

    An error on one rank alone ends the job.  If ``COLLECTIVES_ABORT`` is off, it does not, and
    ``opened`` stays open, because closing is collective.
    """
    try:
        with all_or_nobody(comm):
            yield
    except MPI.Exception:
        raise
    except Exception:  # a program's own layers may raise anything
        if aborts() or all_here(comm):
            opened.close()
        raise


def _expect_same(comm: MPI.Intracomm, config: Config, objects: UserObjects) -> None:
    """Check that all ranks have the same job and the same kinds of objects; collective."""
    layers, metrics, loss = objects.layers, objects.metrics, objects.loss
    expect_same_job(
        comm,
        config,
        {
            "layers": None if layers is None else list(layers),
            "metrics": None if metrics is None else list(metrics),
            "loss": None if loss is None else type(loss).__name__,
            **described(objects.optimizer),
            "schedule": objects.schedule is not None,
        },
    )


def _with_checksums(comm: Communicator, config: Config, opened: ExitStack) -> Communicator:
    """The communicator, or one whose messages carry checksums if the job asks for them."""
    if comm.delays_messages:
        expect(config, "link")
    if not config.parallel.checksums or comm.checks_messages:
        return comm
    checked = Communicator(comm, transport=CheckedTransport.load())
    opened.callback(checked.close)
    return checked


def _add_samples(parts: Parts) -> None:
    """Load the data, and draw the order of the samples and the rates of all steps; collective."""
    comm, config, objects = parts.comm, parts.config, parts.objects
    data, parts.data_digest = load_on_all(
        comm,
        lambda: objects.data or load(config.data, config.run.dtype, config.loss.ignored),
        config.data.path,
    )
    if data.test is None:
        expect_untested(config, objects.metrics)
    parts.data, samples, size = data, len(data.train), config.train.batch_size
    if config.federated.clients:  # an epoch is a round, which is one step
        parts.sampler = Sampler(1, 1, config.run.seed)
    else:
        order = (data.sampler or Sampler)(samples, size, config.run.seed)
        if config.sync.split != "none":
            order = extras.of_workers(parts, order)
        parts.sampler = expect_same_order(comm, order)
        if not order.steps_per_epoch:
            raise ConfigError(
                f"train_data: drop_last leaves all {samples} samples out, as train.batch_size = "
                f"{size} is more; set it to {samples} at most, or drop_last=False"
            )
    every = parts.sampler.steps_per_epoch
    parts.rates = Rates(config.optim, replace(config.train, epochs=config.passes), every)
    parts.rates.tabulate(comm, objects.schedule)


def _add_model(parts: Parts) -> None:
    """Cut the model into stages, and make this rank's layers; collective."""
    comm, config, data, device = parts.comm, parts.config, parts.data, parts.device
    layers, loss = parts.objects.layers, parts.objects.loss
    layout = layout_of(config, comm.size)
    if layers is not None and config.parallel.context > 1:
        expect(config, "own-model")

    def cut() -> tuple[Shape, Partition, dict[str, frozenset[int]]]:
        outline = models.build(config, data, layers=layers, loss=loss)
        if outline.holds:
            expect(config, "torch")
        if outline.repeats:
            expect(config, "recomputed")
        outputs = expect_fitting(outline, data)
        outline = models.build(config, data, layers=layers, loss=loss)  # a loss may tie layers
        expect_values_in_memory(outline, data)
        partition = partition_of(config, outline, layout)
        return outputs, partition, shared_stages(outline, partition, layout)

    outputs, partition, shared = together(comm, cut, ConfigError, DataError)
    if config.parallel.partition == "auto":  # each rank reads a profile of its own
        expect_same(comm, {"the partition by parallel.profile": partition.layers})
    grid = ProcessGrid(comm, layout, shared.values(), device.xp)
    parts.opened.callback(grid.close)
    # With one copy for all ranks, each rank sees all tables.
    spread_over = TensorGroup() if config.server.hogwild else grid.spread
    sharers = grid.context if layout.rows else None
    model = models.build(config, data, grid.tensor, spread_over, layers, loss, sharers)
    check_replicas(comm, [(comm, model.brought())], "in the layers that they were given")
    stage = grid.place.stage
    names = [name for chunk in partition.of_stage(stage) for name in chunk]
    own = {name: model.layers[name] for name in names}
    parts.arena = Arena(
        own,
        {name: layer.shapes() for name, layer in own.items()},
        grid.tensor,
        {name: shared_name(stages) for name, stages in shared.items() if stage in stages},
        spread_over,
    )
    parts.grid, parts.layout, parts.partition = grid, str(layout), partition
    parts.model, parts.layers, metrics = model, names, parts.objects.metrics
    parts.metrics = named_metrics(parts, outputs) if metrics is None else metrics
    parts.watch = Watch(config, parts.metrics)
    parts.measured_rates = measured_rates(parts)


def _add_update(parts: Parts) -> None:
    """Make the store of the parameters and the updater; collective."""
    objects, model, rates, ranks = parts.objects, parts.model, parts.rates, parts.comm
    flat = parts.device.put(together(parts.comm, lambda: initial(parts), ConfigError))
    if is_served := bool(parts.config.server.ranks or parts.config.server.hogwild):
        parts.store = extras.hold_served(parts, flat)
    else:
        parts.store, ranks = build.in_replicas(parts, flat)
    parts.opened.callback(parts.store.close)
    parts.gradient = GlobalGradient(parts.grid, parts.store, ranks, parts.device)

    def updater() -> Updater:
        if parts.config.federated.clients:
            return extras.ServerOptimizer(parts)
        optim, folder = parts.config.optim, parts.config.parallel.offload
        optimizer = objects.optimizer or build.optimizer(optim)
        if optimizer.whole:
            build.expect_whole(parts.config)
        grouping = objects.grouping or groups.by_name(optim, optimizer, list(model.trained()))
        if rates.table and rates.table.options is not None:
            grouping = groups.scheduled(grouping, rates.table)
        if is_served:
            grouping = extras.decayed_in_parts(parts, grouping)
        offload = build.mapped(Path(folder), parts.comm.rank) if folder else None
        if offload:
            parts.store.offload(offload)
        return Updater(
            parts.store, optimizer, grouping, parts.gradient, offload, optim.average,
            optim.clip_value,
        )  # fmt: skip

    parts.updater = together(parts.comm, updater, ConfigError)
    parts.store.squares_parts = parts.config.run.noise_scale
    parts.counting = build.counting(parts)
    if parts.counting and isinstance(parts.store, WholeGradients):
        parts.store.starts_early = False


def _add_pipeline(parts: Parts) -> None:
    """Make the passes through the layers, the feed of samples and the account; collective."""
    run = parts.config.run
    prefixes = tuple(f"{name}." for name in parts.layers)
    whole = whole_state(parts).items()
    state = {name: parts.device.put(array) for name, array in whole if name.startswith(prefixes)}
    parts.passes = Passes(parts, state)
    parts.purity = Purity(parts)
    parts.purity.examine(parts.passes)
    if parts.data.varies:
        parts.padding = extras.Padding(parts)
    if run.on_spike != "go_on":
        parts.spikes = extras.Spikes(run)
    parts.passes.runner()  # the first call is collective
    parts.feed = Feed(parts)
    parts.opened.callback(parts.feed.close)
    parts.account = Account(parts)
    enabled = run.compute == "float16"
    parts.scale = LossScale(run.loss_scale, run.loss_scale_window, enabled=enabled)
