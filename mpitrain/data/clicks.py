"""Random clicks of users: numbered features, with labels of a hidden linear model."""

import numpy as np

from mpitrain.data.dataset import Dataset, Samples


def draw(samples: int, tables: int, rows: int, test_fraction: float) -> Dataset:
    """Integers (N, tables) below ``rows``, popular ones more often, labelled 0 or 1.

    Every run draws the same, so that accuracies compare.
    """
    rng = np.random.default_rng(0)
    # Squares of uniform numbers: a few rows of a table are asked for most often.
    inputs = (rows * rng.random((samples, tables)) ** 2).astype(np.int64)
    taste = rng.normal(size=(tables, rows))
    score = taste[np.arange(tables), inputs].sum(axis=1)
    labels = (score + rng.normal(scale=0.5, size=samples) > 0).astype(np.int64)
    split = samples - max(1, int(samples * test_fraction))
    return Dataset(
        Samples(inputs[:split], labels[:split]), Samples(inputs[split:], labels[split:]), 2
    )
