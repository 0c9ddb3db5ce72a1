"""Scans of handwritten digits that come with scikit-learn (UCI ML, Alpaydin & Kaynak 1998)."""

from functools import cache

import numpy as np
from numpy.typing import DTypeLike
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from mpitrain.data.dataset import DataError, Dataset, Samples


def load(test_fraction: float, dtype: DTypeLike) -> Dataset:
    """1797 images of 8x8 points in 0..1 as (N, 8, 8, 1), with labels 0..9.

    The split keeps each digit's share and is the same in every run, so that accuracies compare.

    Raises:
        DataError: a part would not have each digit.
    """
    images, labels = _scans()
    inputs = (images / 16).reshape(-1, 8, 8, 1).astype(dtype)
    try:
        train_x, test_x, train_y, test_y = train_test_split(
            inputs, labels, test_size=test_fraction, stratify=labels, random_state=0
        )
    except ValueError as error:  # it takes fractions between 0 and 1 alone
        raise DataError(
            f"data.test_fraction = {test_fraction:g} of {len(labels)} digits leaves too few to "
            "train or to test on, where each of the 10 must be; take 0.01 to 0.99"
        ) from error
    return Dataset(Samples(train_x, train_y), Samples(test_x, test_y), classes=10)


@cache  # reading the text takes longer than a short training
def _scans() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return images, labels
