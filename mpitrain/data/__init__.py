"""Data sets by name, and the order of their samples."""

from pathlib import Path
from typing import assert_never

from numpy.typing import DTypeLike

from collectives.errors import needed
from collectives.files import check_regular
from mpitrain import extras
from mpitrain.config import Data
from mpitrain.data.dataset import DataError, Dataset, Samples
from mpitrain.data.digests import digest
from mpitrain.data.sampler import Sampler

__all__ = ["DataError", "Dataset", "Sampler", "Samples", "check", "digest", "load"]


def check(config: Data) -> None:
    """Raises ImportError if the package of the data is not installed."""
    if config.name == "digits":
        needed("scikit-learn", "data", "data.name = 'digits'", module="sklearn.datasets")


def load(config: Data, dtype: DTypeLike, ignored: int | None = None) -> Dataset:
    """Data set of the [data] table, the same on every rank; ``ignored``: a label that is no class.

    Raises:
        ImportError: the package of the data is not installed.
        DataError: a file cannot be read or is wrong.
    """
    path = Path(config.path)
    if not config.path and config.name not in ("digits", "clicks"):
        raise DataError(f"data.path: data.name = {config.name!r} reads files; name them here")
    if path.exists() and not path.is_dir():
        try:
            check_regular(path)
        except OSError as error:
            raise DataError(f"data.path = {config.path!r}: {error.strerror}") from error
    match config.name:
        case "digits":
            check(config)
            return extras.load_digits(config.test_fraction, dtype)
        case "idx":
            return extras.load_idx(path, dtype)
        case "arrays":
            return extras.load_arrays(path, config.test_fraction, dtype, ignored)
        case "text":
            return extras.load_text(path, config.units, config.context, config.test_fraction)
        case "tokens":
            return extras.load_tokens(path, config.context, config.vocabulary or None)
        case "clicks":
            return extras.draw_clicks(
                config.samples, config.tables, config.rows, config.test_fraction
            )
        case _:
            assert_never(config.name)
