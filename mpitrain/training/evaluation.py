"""Tests of the model on the test samples, in the same layout as training."""

from contextlib import closing
from math import lcm

import numpy as np

from mpitrain.arrays import Array, Scalar
from mpitrain.data import DataError
from mpitrain.metrics.records import Epoch
from mpitrain.nn import Context
from mpitrain.objective import reduction_of
from mpitrain.step.agreement import over_counted
from mpitrain.training.averaged import averaged
from mpitrain.training.batches import MicroBatches
from mpitrain.training.parts import Parts

#: Micro-batches of each replica that are read at a time.
_AT_A_TIME = 8


def evaluate(parts: Parts, epoch: int) -> Epoch:
    """Mean loss and metrics on the test samples; collective.

    The weights are those of :func:`~mpitrain.training.averaged.averaged`.

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
        # All tensor ranks of a stage have the same sums, so only the first reports them.
        told = (device.read([mean, counted]), totals) if place.tensor == 0 else ([0.0, 0.0], {})
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
