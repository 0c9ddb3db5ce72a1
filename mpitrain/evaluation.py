"""The model judged on the test samples, in the layout that trains it."""

from math import lcm

import numpy as np

from mpitrain.arrays import Array
from mpitrain.batches import MicroBatches
from mpitrain.metrics import Epoch
from mpitrain.trainer import Trainer


def evaluate(trainer: Trainer, epoch: int) -> Epoch:
    """Accuracy and mean loss on the test samples; collective."""
    test, size = trainer.data.test, trainer.config.train.batch_size
    # As many micro-batches for every replica; the last ones may be empty.
    replicas = lcm(*trainer.grid.layout.replicas)
    count = -(-len(test) // size)
    count += -count % replicas
    batches = [np.arange(i * size, min((i + 1) * size, len(test))) for i in range(count)]
    labels = len(test) * trainer.data.labels_per_sample
    loss = trainer.model.loss
    source = MicroBatches(test, batches, 1, loss, dtype=trainer.compute_type)
    totals = np.zeros(2)

    def judge(micro_batch: int, outputs: Array) -> None:
        found = source.labels(micro_batch)
        # Collective over the tensor ranks of the last stage, each of which then has all of it.
        own, _ = loss(outputs, found, labels)
        right = loss.right(outputs, found)
        if trainer.grid.place.tensor == 0:
            totals[:] += right, own

    trainer.runner().infer(source, count, trainer.weights, judge)
    right, mean = trainer.comm.allreduce(totals).tolist()
    return Epoch(epoch, right / labels, mean)
