"""The order of samples: global batches first, then each rank's share of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Array


@dataclass(frozen=True)
class Sampler:
    """Global batches of sample indices, the same for any number of ranks.

    Attributes:
        samples: samples of an epoch; each is in exactly one batch.
        batch_size: samples of a batch; the last one of an epoch has the rest.
        seed: seed of the orders.
        shuffles: whether batches are shuffled; streams keep their order.
        stream: more words of the seed, for other samples with the same seed.
    """

    samples: int
    batch_size: int
    seed: int
    shuffles: bool = True
    stream: tuple[int, ...] = ()

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return -(-self.samples // self.batch_size)

    def batches(self, epoch: int) -> Iterator[Array]:
        """Batches of ``epoch`` in turn: arrays of indices."""
        # The epoch as a spawn key: as a second word of entropy, epoch 0 would repeat the stream
        # that the seed alone gives, from which parameters are drawn.
        seeds = np.random.SeedSequence(self.seed, spawn_key=(epoch, *self.stream))
        order = np.arange(self.samples)
        if self.shuffles:
            order = np.random.default_rng(seeds).permutation(self.samples)
        for start in range(0, self.samples, self.batch_size):
            yield order[start : start + self.batch_size]
