"""The model judged on the test samples, in the layout that trains it."""

from math import lcm

import numpy as np

from mpitrain.arrays import Array
from mpitrain.batches import MicroBatches
from mpitrain.metrics import Epoch
from mpitrain.trainer import Trainer


def evaluate(trainer: Trainer, epoch: int) -> Epoch:
    """Mean loss on the test samples, and the job's metrics; collective."""
    test, size = trainer.data.test, trainer.config.train.batch_size
    # Every replica has equally many micro-batches; the last ones may be empty.
    replicas = lcm(*trainer.grid.layout.replicas)
    count = -(-len(test) // size)
    count += -count % replicas
    batches = [np.arange(i * size, min((i + 1) * size, len(test))) for i in range(count)]
    labels = len(test) * trainer.data.labels_per_sample
    loss = trainer.model.loss
    source = MicroBatches(test, batches, 1, loss, dtype=trainer.compute_type)
    mean = 0.0
    totals: dict[str, Array] = {}

    def judge(micro_batch: int, outputs: Array) -> None:
        nonlocal mean
        found = source.labels(micro_batch)
        # Collective over the tensor ranks of the last stage, each of which then has all of it.
        mean += loss(outputs, found, labels)[0]
        for name, metric in trainer.metrics.items():
            totals[name] = totals.get(name, 0) + metric.add(outputs, found)

    trainer.runner().infer(source, count, trainer.weights, judge, trainer.context())
    # Of a stage's tensor ranks, the first alone tells.
    own = (mean, totals) if trainer.grid.place.tensor == 0 else (0.0, {})
    every = trainer.comm.allgather(own)
    found = {
        name: metric.value(sum(told[name] for _, told in every if name in told))
        for name, metric in trainer.metrics.items()
    }
    return Epoch(epoch, sum(mean for mean, _ in every), found)
