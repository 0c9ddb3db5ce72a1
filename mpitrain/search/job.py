"""A job as the search sees it: its model, and the costs of the layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from mpitrain import data, models
from mpitrain.arrays import Shape
from mpitrain.config import Config, ConfigError, expect
from mpitrain.config.own import brought
from mpitrain.data.dataset import Dataset, Samples
from mpitrain.group import TensorGroup
from mpitrain.models import SequentialModel
from mpitrain.nn.positions import Positions, Way
from mpitrain.parallel.precision import compute_type
from mpitrain.pipeline.profiles import LayerProfile, measure_layers
from mpitrain.search.axes import Axes
from mpitrain.search.candidates import Candidate
from mpitrain.search.exchange import coding_seconds, exchange
from mpitrain.search.layers import LayerCost, layer_costs
from mpitrain.search.layouts import Search
from mpitrain.search.machine import Machine
from mpitrain.search.stages import Numerics, ReplicaExchange
from mpitrain.training import build
from mpitrain.training.build import compression

if TYPE_CHECKING:
    from mpitrain.optim.optimizers import Optimizer


@dataclass(frozen=True)
class Job:
    """A job whose model is made, in one process and whole.

    Attributes:
        config: the job.
        model: its model.
        data: its data; without samples where only their shape is known.
        optimizer: its optimiser.
        is_own: whether the program brought the model.
    """

    config: Config
    model: SequentialModel
    data: Dataset
    optimizer: "Optimizer"
    is_own: bool = False

    def search(self, machine: Machine, *, is_counted: bool) -> Search:
        """The search for layouts of the job on a machine.

        Args:
            machine: the cluster.
            is_counted: whether the costs of the layers are operations, counted from their shapes;
                else each is timed in this process.

        Raises:
            ConfigError: layers are timed and there are no samples, or counted and the program's.
        """
        config = self.config
        stored = np.dtype(config.run.dtype)
        computed = compute_type(config.run.compute, config.run.dtype)
        slots = len(self.optimizer.slots) + bool(config.optim.average)
        # A step reads and writes a parameter and its state, and reads its gradient.
        stepping = (3 + 2 * slots) * stored.itemsize / machine.stream
        if not is_counted and not self.optimizer.whole:
            stepping = step_seconds(self.optimizer, stored, config.parallel.bucket_bytes)
        coding = 0.0
        if config.compress.codec != "none":
            # A codec reads and writes each number twice.
            coding = 4 * stored.itemsize / machine.stream
            if not is_counted:
                coding = coding_seconds(compression(config.compress), stored)
        bucket = config.parallel.bucket_bytes
        numerics = Numerics(stored.itemsize, computed.itemsize, slots, stepping, bucket)

        @cache
        def ours(tensor: int, ranks: int, is_sharded: bool, is_spread: bool) -> ReplicaExchange:
            shapes = self._summed_shapes(tensor, is_spread=is_spread)
            found = exchange(config, shapes, ranks, numerics, is_sharded=is_sharded)
            return replace(found, coding=coding * (ranks > 1))

        def told(own: Candidate) -> ReplicaExchange:
            return ours(own.tensor, own.summing, own.zero > 0, own.experts != 1)

        return Search(
            self._layers(is_counted=is_counted),
            machine,
            config.train.batch_size,
            numerics,
            self.axes,
            told,
        )

    def _summed_shapes(self, tensor: int, *, is_spread: bool) -> list[Shape]:
        """Shapes of a rank's parameters whose gradients all replicas sum.

        ``tensor``: ranks that share each layer; ``is_spread``: each replica has some of the experts
        or tables only.
        """
        shapes: list[Shape] = []
        for name, own, shape in self.model.trained_in(self.model.layers):
            layer = self.model.layers[name]
            if not is_spread or own not in {*layer.placed, *layer.spread}:
                axis = layer.split.get(own)
                parts = (tensor if at == axis else 1 for at in range(len(shape)))
                shapes.append(tuple(-(-n // p) for n, p in zip(shape, parts, strict=True)))
        return shapes

    @property
    def axes(self) -> Axes:
        """Parts of the model that ranks can share."""
        own = self.config.model
        if self.is_own:
            return Axes()
        match own.kind:
            case "gpt":
                heads, positions = gcd(own.heads, 4 * own.width), self.config.data.context
                return Axes(heads, positions, own.experts)
            case "mlp":
                return Axes(gcd(*own.hidden))
            case "convnet" | "vgg" | "resnet":
                rows = 0 if self.data.varies else self.data.input_shape[0]
                return Axes(gcd(*own.channels), rows=rows)
            case _:
                return Axes(spread=True)

    def _layers(self, *, is_counted: bool) -> list[LayerCost]:
        """Costs of the layers for a sample: in seconds on this machine, or in operations."""
        layers = layer_costs(self.model, self.data.input_shape)
        if is_counted and self.is_own:
            raise ConfigError(
                "--flops: a model of the program has no shapes to count operations from; leave it "
                "out, so that each layer is timed here"
            )
        if is_counted:
            return layers
        if not len(self.data.train):
            raise ConfigError(
                f"data.path = {self.config.data.path!r}: there are no samples to time the layers "
                "with; give --flops, and operations are counted from their shapes"
            )
        with threadpool_limits(1, user_api="blas"):  # a core for each rank
            return self._timed(layers)

    def _timed(self, layers: Sequence[LayerCost]) -> list[LayerCost]:
        """These layers with the seconds that they take here, and what two ranks do not share."""
        config, axes = self.config, self.axes
        samples = max(1, config.train.batch_size // config.train.micro_batches)

        def lines(model: SequentialModel = self.model, **shared: Any) -> list[_Line]:
            timed = [
                measure_layers(with_samples(config, count), model, self.data, **shared)
                for count in (samples, max(1, samples // 8))
            ]
            return [_Line.through(a, b, samples) for a, b in zip(*timed, strict=True)]

        whole, parts, ways = lines(), {}, list[Way]()
        if axes.shareable and axes.shareable % 2 == 0:
            pair = _OneOfTwo(0)
            halved = models.build(_plain(config), self.data, pair)
            parts = {"tensor": lines(halved, group=pair)}
        if axes.positions > 1:  # the last rank sees most keys
            ways = axes.ways(Candidate(1, 1, 1, context=2))
            # Pieces of one length, as those of the other rank stand for its own.
            length = axes.positions - axes.positions % min(4, axes.positions - axes.positions % 2)
            cuts = {way: Positions(_OneOfTwo(1), length, way) for way in ways}
            parts |= {way: lines(positions=cut) for way, cut in cuts.items()}
        found = []
        for at, (layer, own) in enumerate(zip(layers, whole, strict=True)):
            each = {name: part[at].beside(own) for name, part in parts.items()}
            unshared, _ = each.get("tensor", (0.0, 0.0))
            timed = replace(layer, forward=own.forward, backward=own.backward, fixed=own.fixed / 3)
            among = {way: each[way] for way in ways}
            found.append(replace(timed, unshared=unshared, among_positions=among))
        return found


class _Line(NamedTuple):
    """Seconds of both passes of a layer, whatever the samples, and of each pass for a sample."""

    fixed: float
    forward: float
    backward: float

    @classmethod
    def through(cls, many: LayerProfile, few: LayerProfile, samples: int) -> Self:
        """The line through the seconds of ``samples`` and of an eighth of them."""
        less, fixed = max(1, samples // 8), 0.0
        if samples > less:
            slope = (many.seconds - few.seconds) / (samples - less)
            fixed = min(max(0.0, few.seconds - less * slope), many.seconds)
        scale = (1 - fixed / many.seconds) / samples if many.seconds else 0.0
        return cls(fixed, scale * many.forward_s, scale * many.backward_s)

    def beside(self, whole: "_Line") -> tuple[float, float]:
        """For the part of one of two ranks: the share of the work for samples that each does whole,
        and further fixed seconds of a forward pass."""
        own, all_ = self.forward + self.backward, whole.forward + whole.backward
        unshared = 2 * own / all_ - 1 if all_ else 0.0
        return min(max(0.0, unshared), 1.0), max(0.0, self.fixed - whole.fixed) / 3


def step_seconds(optimizer: "Optimizer", dtype: np.dtype, nbytes: int) -> float:
    """Seconds of an optimiser's step for a parameter, bucket by bucket, the best of some."""
    # As after a step's passes, no cache has the numbers of the next bucket.
    count = 1 << 20
    size = min(max(1 << 12, nbytes // dtype.itemsize), count)
    p, g, *slots = np.ones((2 + len(optimizer.slots), count), dtype)
    buckets = [slice(first, first + size) for first in range(0, count, size)]
    seconds = []
    for number in range(1, 6):
        start = perf_counter()
        for own in buckets:
            state = {name: slot[own] for name, slot in zip(optimizer.slots, slots, strict=True)}
            optimizer.take_step(p[own], g[own], state, number, 0.0, 1.0)
        seconds.append(perf_counter() - start)
    return min(seconds) / count


def load_job(config: Config, command: str) -> Job:
    """The job with its model, whatever its layout says; nothing runs on other ranks.

    Args:
        config: the job.
        command: the command that asks, for refusals.

    Raises:
        ConfigError: ranks take no steps together in this job, or its model cannot be made.
        DataError: its data cannot be read.
    """
    expect(config, "steps", command=command)
    plain = _plain(config)
    if config.own == type(config.own)():
        found = _dataset(plain)
        return Job(config, models.build(plain, found), found, build.optimizer(config.optim))
    from mpi4py import MPI

    from mpitrain.normalise import normalise
    from mpitrain.user_objects import Given

    job, objects, _ = normalise(MPI.COMM_SELF, plain, Given(**brought(config.own)), {})
    found = objects.data or _dataset(plain)
    model = models.build(job, found, layers=objects.layers, loss=objects.loss)
    optimizer = objects.optimizer or build.optimizer(config.optim)
    run = msgspec.structs.replace(config, run=job.run)
    return Job(run, model, found, optimizer, is_own=objects.layers is not None)


class _OneOfTwo(TensorGroup):
    """One of two ranks, alone: sums are its own part, and what comes is its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.size = rank, 2


def _plain(config: Config) -> Config:
    """The job with its model whole on each rank."""
    return with_layout(config, **Candidate(1, 1, 1).keys(), partition="even")


def with_samples(config: Config, count: int) -> Config:
    """The job with micro-batches of this many samples."""
    changed = msgspec.structs.replace
    return changed(config, train=changed(config.train, batch_size=count, micro_batches=1))


def with_layout(config: Config, **keys: object) -> Config:
    """The job with other keys in [parallel].

    Raises:
        ValueError: they do not go together with the others.
    """
    changed = msgspec.structs.replace
    return changed(config, parallel=changed(config.parallel, **keys))


def _dataset(config: Config) -> Dataset:
    """The job's data; for tokens of a known vocabulary, their shape without the files."""
    own = config.data
    is_there = own.path and Path(own.path).exists()
    if own.name == "tokens" and own.vocabulary and not is_there:
        nothing = np.zeros((0, own.context), np.int64)
        return Dataset(Samples(nothing, nothing), None, own.vocabulary)
    return data.load(own, config.run.dtype, config.loss.ignored)
