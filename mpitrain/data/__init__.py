"""Data sets by name, and the order in which ranks read them."""

from typing import assert_never

from numpy.typing import DTypeLike

from mpitrain.config import Data
from mpitrain.data.dataset import Dataset, Samples
from mpitrain.data.sampler import Sampler, share

__all__ = ["Dataset", "Sampler", "Samples", "load", "share"]


def load(config: Data, dtype: DTypeLike) -> Dataset:
    """The data set of the [data] table, the same on every rank.

    Raises:
        ImportError: the package that the data come with is not installed.
    """
    match config.name:
        case "digits":
            try:
                from mpitrain.data import digits
            except ImportError as error:
                raise ImportError(
                    f"data.name = 'digits' needs scikit-learn ({error}); pip install scikit-learn"
                ) from error
            return digits.load(config.test_fraction, dtype)
        case _:
            assert_never(config.name)
