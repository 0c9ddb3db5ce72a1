"""Data of a program as the data set of a job."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from mpi4py import MPI

from collectives.errors import words
from mpitrain import nn
from mpitrain.arrays import Array
from mpitrain.config import Config
from mpitrain.data import DataError, Dataset, load
from mpitrain.data.own import MapStyle, OwnSamples
from mpitrain.data.stream import Streamed, is_stream
from mpitrain.fields import Fields
from mpitrain.ranks.together import together

#: Samples by number or in turn.
Data = MapStyle | Iterable[Any]


def given(
    comm: MPI.Intracomm,
    job: Config,
    train_data: Data | None,
    test_data: Data | None,
    layers: Mapping[str, nn.Layer] | None,
    classes: int,
) -> Dataset | None:
    """Data set of a program's data, or None without any; collective.

    Args:
        comm: the ranks.
        job: the job, for its type, seed and workers.
        train_data, test_data: samples by number or in turn; ``test_data`` may be left out.
        layers: layers of the model, whose scores give the number of classes.
        classes: number of classes of integer labels; 0: from the last layer.

    Raises:
        TypeError: ``test_data`` alone.
        DataError: on all ranks, if one has no samples or training and test samples differ.
    """
    if train_data is None:
        if test_data is not None:
            raise TypeError("test_data without train_data: the job's own are not mixed; give both")
        return None

    def made() -> Dataset:
        train = _samples("train_data", train_data, job)
        test = None if test_data is None else _samples("test_data", test_data, job)
        if test is not None:
            _expect_alike(train, test)
        found = Dataset(train, test, 0)
        if found.label_dtype.kind in "fV":  # numbers, or several arrays
            return found
        kinds = classes or _scores(layers, found)
        if test is not None:
            test = replace(test, classes=kinds)
        return Dataset(replace(train, classes=kinds), test, kinds)

    return together(comm, made, DataError)


def first(job: Config, train_data: Data | None) -> Array:
    """Inputs of the first three samples, of the program's data or the job's.

    Raises:
        DataError: they cannot be read.
    """
    if train_data is None:
        return load(job.data, job.run.dtype).train[:3].inputs
    return _samples("train_data", train_data, job)[:3].inputs


def _expect_alike(train: OwnSamples, test: OwnSamples) -> None:
    both = (vars(samples[:1]).values() for samples in (train, test))
    for name, one, other in zip(("inputs", "labels"), *both):
        if (one.shape, _kind(one)) != (other.shape, _kind(other)):
            raise DataError(
                f"train_data has {name} of {one.dtype}, shape {one.shape[1:]}, and test_data of "
                f"{other.dtype}, {other.shape[1:]}; they must be alike"
            )


def _samples(what: str, data: Any, job: Config) -> OwnSamples:
    try:
        count = len(data)
    except Exception as error:  # whatever a program's own function raises
        raise DataError(
            f"{what} has no length, from which epochs, rates and resumed runs follow "
            f"({words(error)}); give it __len__, or mpitrain.Stream(data, samples)"
        ) from error
    if not count:
        raise DataError(f"{what} has no samples")
    if not is_stream(data):
        return OwnSamples(data, job.run.dtype, job.run.seed)
    if getattr(data, "batch_sampler", None) is not None:
        raise DataError(
            f"{what} is a DataLoader that gives batches, each of which would be one sample here; "
            "give its dataset, with batch_size= and workers= of the trainer, whose batches are the "
            "same on any number of ranks, or DataLoader(dataset, sampler=..., batch_size=None) for "
            "an order of your own"
        )
    if job.data.workers > 1 and not hasattr(data, "starting_at"):
        raise DataError(
            f"data.workers = {job.data.workers}: each process would read all of {what}, which is "
            "read in turn; take 1, or give it starting_at(number), which begins at a sample"
        )
    return Streamed(data, job.run.dtype, job.run.seed)


def _scores(layers: Mapping[str, nn.Layer] | None, data: Dataset) -> int:
    """Number of the last layer's scores; 0 if labels are as many numbers as outputs."""
    if layers is None:
        raise DataError("labels are integers, and nothing says of how many classes: give classes=")
    try:
        shape = nn.Chain(layers).output_shape(data.input_shape)
    except ValueError as error:
        raise DataError(f"model: {error}") from error
    if isinstance(shape, Fields) or prod(shape) == prod(data.label_shape):
        return 0
    return shape[-1]


def _kind(array: Array) -> object:
    return array.dtype if array.dtype.names else array.dtype.kind
