"""Tests of the model on the test samples, in the layout of training, and their weights."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from math import lcm
from typing import cast

import numpy as np

from mpitrain.arrays import Array, Scalar
from mpitrain.data import DataError
from mpitrain.metrics.records import Epoch
from mpitrain.nn import Context
from mpitrain.objective import reduction_of
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.ranks.together import all_here
from mpitrain.step.agreement import over_counted
from mpitrain.step.update import AVERAGE
from mpitrain.training.batches import MicroBatches
from mpitrain.training.parts import SHARED_ERRORS, Parts

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
    totals: dict[str, Array] = {}

    def own(count: int) -> range:
        ours = range(place.replica, count, layout.replicas[place.stage])
        return ours if parts.partition.needs_samples(place.stage) else ours[:0]

    def judge(micro_batch: int, outputs: Array) -> None:
        nonlocal mean, counted
        found = source.labels(micro_batch)
        # Collective over the tensor ranks of the last stage; each of them gets the whole result.
        divisor = len(test) * source.labels_of_sample(micro_batch)
        value, _, *count = loss(outputs, found, 1 if reduction == "sum" else divisor)
        mean = mean + device.number(value)
        if count:
            counted = counted + device.number(count[0])
        for name, metric in parts.metrics.items():
            totals[name] = totals.get(name, 0) + device.get(metric.add(outputs, found))

    with (
        averaged(parts),
        closing(parts.feed.batches("test", -1, batches, _AT_A_TIME * replicas, 1, own)) as reading,
    ):
        for some, held in reading:
            source = passes.source(held, some, parts=1)

            def context(number: int, source: MicroBatches = source) -> Context:
                return passes.resting(source.indices(number))

            passes.runner().infer(source, len(some), passes.weights, judge, context)
        # The ranks that share layers or images have the same sums, so only the first reports them.
        is_first = place.tensor == 0 and not (layout.rows and place.context)
        told = (device.read([mean, counted]), totals) if is_first else ([0.0, 0.0], {})
        every = parts.comm.allgather(told)
        parts.purity.expect("test")
    found = {
        name: metric.value(sum(told[name] for _, told in every if name in told))
        for name, metric in parts.metrics.items()
    }
    mean, counted = (sum(column) for column in zip(*(own for own, _ in every), strict=True))
    if reduction == "count":
        mean *= over_counted(len(test) * each, counted)
    return Epoch(epoch, mean, found)


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
        parts.updater.exchange()
        return parts.updater.exchange
    together = strategy.mean(parts.updater.slot(AVERAGE)) if average else strategy.consensus()
    parameters = cast(Replicated, parts.store).parameters
    own = parameters.copy()
    parameters[...] = together

    def back() -> None:
        parameters[...] = own

    return back
