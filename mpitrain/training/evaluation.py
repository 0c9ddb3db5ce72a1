"""Tests of the model on the test samples, in the layout of training, and their weights."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from math import lcm
from operator import itemgetter
from typing import Any, cast

import numpy as np

from collectives.errors import words
from mpitrain import extras
from mpitrain.arrays import Array, Scalar
from mpitrain.config import ConfigError
from mpitrain.data import DataError
from mpitrain.metrics.records import Epoch
from mpitrain.nn import Context
from mpitrain.objective import reduction_of
from mpitrain.objective.metrics import AllSamples, Metric
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.ranks.together import all_here, by_rank_0
from mpitrain.training.batches import MicroBatches
from mpitrain.training.parts import SHARED_ERRORS, Parts
from mpitrain.update.agreement import mean_correction
from mpitrain.update.updater import AVERAGE

#: Micro-batches of each replica that are read at a time.
_AT_A_TIME = 8


def evaluate(parts: Parts, epoch: int) -> Epoch:
    """Mean loss and metrics on the test samples; collective.

    The weights are those of :func:`~mpitrain.training.evaluation.averaged`.

    Raises:
        DataError, ConfigError: on all ranks: there is no sample to test on, one cannot be read, or
            a layer, a loss or a metric of the program's own is not a function of its inputs.
        RuntimeError: the trainer is closed.
    """
    parts.expect_open()
    test, size = parts.data.test, parts.config.train.batch_size
    if test is None:
        raise DataError("there is nothing to test on: the job was given no test_data")
    layout, place = parts.grid.layout, parts.grid.place
    # All replicas have the same number of micro-batches; the last ones may be empty.
    replicas = lcm(*layout.replicas)
    count = -(-len(test) // size)
    count += -count % replicas
    batches = (np.arange(i * size, min((i + 1) * size, len(test))) for i in range(count))
    loss, device, passes = parts.model.loss, parts.device, parts.passes
    reduction, each = reduction_of(loss), parts.data.labels_per_sample
    mean: Scalar = 0.0
    counted: Scalar = 0.0
    metrics = {**parts.metrics}
    if getattr(loss, "several", 0):  # means over several things are a metric, too
        metrics["loss"] = cast(Metric, loss)
    whole = any(isinstance(metric, AllSamples) for metric in metrics.values())
    totals: dict[str, Array] = {}
    kept: list[tuple[int, Array, Array]] = []
    is_alone = not (place.tensor or place.context)  # the first of the ranks that share samples

    def own(count: int) -> range:
        ours = range(place.replica, count, layout.replicas[place.stage])
        return ours if parts.partition.needs_samples(place.stage) else ours[:0]

    def judge(micro_batch: int, outputs: Array) -> None:
        nonlocal mean, counted
        found = source.labels(micro_batch)
        # Collective over the tensor ranks of the last stage; each of them gets the whole result.
        divisor = len(test) * source.labels_of_sample(micro_batch)
        if "loss" not in metrics:
            value, _, *count = loss(outputs, found, 1 if reduction == "sum" else divisor)
            mean = mean + device.number(value)
            if count:
                counted = counted + device.number(count[0])
        if whole and len(found):
            first = int(source.indices(micro_batch)[0])
            samples = _whole(parts, device.get(outputs), device.get(found))
            if is_alone:
                kept.append((first, *samples))
        for name, metric in metrics.items():
            if not isinstance(metric, AllSamples):
                totals[name] = totals.get(name, 0) + device.get(metric.add(outputs, found))

    with (
        averaged(parts),
        closing(parts.feed.batches("test", -1, batches, _AT_A_TIME * replicas, 1, own)) as reading,
    ):
        for some, held in reading:
            source = passes.source(held, some, parts=1)

            def context(number: int, source: MicroBatches = source) -> Context:
                return passes.resting(source.indices(number))

            with parts.passing():
                passes.runner().infer(source, len(some), passes.weights, judge, context)
        # The ranks that share layers or images have the same sums, so only the first reports them.
        is_first = place.tensor == 0 and not (layout.rows and place.context)
        told = (device.read([mean, counted]), totals) if is_first else ([0.0, 0.0], {})
        every = parts.comm.allgather(told)
        parts.purity.expect("test")
    pieces = parts.comm.gather(kept) if whole else None
    found = {
        name: _of_all(parts, name, metric, pieces)
        if isinstance(metric, AllSamples)
        else metric.value(sum(told[name] for _, told in every if name in told))
        for name, metric in metrics.items()
    }
    mean, counted = (sum(column) for column in zip(*(own for own, _ in every), strict=True))
    if reduction == "count":
        mean *= mean_correction(len(test) * each, counted)
    return Epoch(epoch, found.pop("loss", mean), found)


def _whole(parts: Parts, outputs: Array, labels: Array) -> tuple[Array, Array]:
    """Outputs and labels of whole samples, of which ranks have positions or columns; collective."""
    group, cut, columns = parts.model.group, parts.passes.cut, parts.data.outputs
    if group.size > 1:
        scores = np.zeros((*outputs.shape[:-1], columns), outputs.dtype)
        scores[..., group.share(columns)] = outputs
        outputs = group.sum(scores)
    if extras.Positions.made(cut):
        return cut.gather(outputs), cut.gather(labels)
    return outputs.copy(), labels


def _of_all(parts: Parts, name: str, metric: AllSamples, pieces: Any) -> float:
    """A metric of all samples, of which rank 0 has the ranks' ``pieces``; collective."""

    def act() -> float:
        every = sorted((one for some in pieces for one in some), key=itemgetter(0))
        try:
            return metric.value(*(np.concatenate([one[n] for one in every]) for n in (1, 2)))
        except Exception as error:  # whatever a program's own function raises
            raise ConfigError(
                f"metrics: {name} fails for all test samples at once ({words(error)})"
            ) from error

    return by_rank_0(parts.comm, act, ConfigError)


@contextmanager
def averaged(parts: Parts) -> Iterator[None]:
    """Put the weights for tests in place, on all ranks, inside of a ``with`` statement.

    These are the averages of ``optim.average`` if the job has them, and the consensus of workers
    that train by themselves.  The body of the statement must end with a message from every rank, so
    that no rank still reads these weights when the old ones return.  Collective.
    """
    back = _replace(parts)
    if back is None:
        yield
        return
    parts.refresh()
    try:
        yield
    except BaseException as error:
        back()
        # After an error of one rank alone, the others do not join the refresh of shards.
        shared = isinstance(error, SHARED_ERRORS)
        if parts.store.is_replicated or (shared and all_here(parts.comm)):
            parts.refresh()
        raise
    back()
    parts.refresh()


def _replace(parts: Parts) -> Callable[[], None] | None:
    """Put the weights for tests into this rank's pieces; returns a function that undoes it."""
    average, strategy = parts.config.optim.average, parts.strategy
    if strategy is None:
        if not average:
            return None
        parts.updater.swap_averages()
        return parts.updater.swap_averages
    together = strategy.mean(parts.updater.slot(AVERAGE)) if average else strategy.consensus()
    parameters = cast(Replicated, parts.store).parameters
    own = parameters.copy()
    parameters[...] = together

    def back() -> None:
        parameters[...] = own

    return back
