"""Data of a program as the data set of a job."""

import logging
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
from mpitrain.data.loaders import Taken
from mpitrain.data.map_style import MapStyle, OwnSamples
from mpitrain.data.stream import Streamed
from mpitrain.fields import Fields, described
from mpitrain.ranks.together import together

log = logging.getLogger("mpitrain")

#: Samples by number or in turn.
Data = MapStyle | Iterable[Any]


def given(
    comm: MPI.Intracomm,
    job: Config,
    train: Taken | None,
    test: Taken | None,
    layers: Mapping[str, nn.Layer] | None,
    classes: int,
) -> Dataset | None:
    """Data set of a program's data, or None without any; collective.

    Args:
        comm, job: the ranks and their job.
        train, test: samples by number or in turn; ``test`` may be left out.
        layers: layers of the model, whose scores give the number of classes.
        classes: number of classes of integer labels; 0: from the last layer.

    Raises:
        TypeError: ``test`` alone.
        DataError: on all ranks, if one has no samples or training and test samples differ.
    """
    if train is None:
        if test is not None:
            raise TypeError("test_data without train_data: the job's own are not mixed; give both")
        return None

    def made() -> tuple[Dataset, list[str]]:
        own = _samples("train_data", train, job)
        others = None if test is None else _samples("test_data", test.tested(), job)
        varies = any(one is not None and one.collate is not None for one in (own, others))
        if others is not None:
            _expect_alike(own, others, varies=varies)
        left_out, in_turn, draws = own.outline()
        said = [f"the model does not see {one}, which is no number" for one in left_out]
        if draws:
            said.append(
                "collate_fn draws random numbers, which differ from layout to layout; draw them in "
                "the data set for one process's numbers"
            )
        found = Dataset(own, others, 0, train.sampler, varies, in_turn)
        if found.label_dtype.kind in "fV":  # numbers, or several arrays
            return found, said
        kinds = classes or _scores(layers, found)
        if others is not None:
            others = replace(others, classes=kinds)
        own = replace(own, classes=kinds)
        return replace(found, train=own, test=others, classes=kinds), said

    found, said = together(comm, made, DataError)
    for one in said:
        log.warning("%s", one)
    return found


def first(job: Config, train: Taken | None) -> Array:
    """Inputs of the first three samples, of the program's data or the job's.

    Raises:
        DataError: they cannot be read.
    """
    if train is None:
        return load(job.data, job.run.dtype).train[:3].inputs
    return _samples("train_data", train, job)[:3].inputs


def _expect_alike(train: OwnSamples, test: OwnSamples, *, varies: bool) -> None:
    both = (vars(samples[:1]).values() for samples in (train, test))
    for name, one, other in zip(("inputs", "labels"), *both):
        if _kinds(one, varies) != _kinds(other, varies):
            raise DataError(
                f"train_data has {name} of {one.dtype}, shape {one.shape[1:]}, and test_data of "
                f"{other.dtype}, {other.shape[1:]}; they must be alike"
            )


def _samples(what: str, given: Taken, job: Config) -> OwnSamples:
    data: Any = given.data
    try:
        count = len(data)
    except Exception as error:  # whatever a program's own function raises
        raise DataError(
            f"{what} has no length, from which epochs, rates and resumed runs follow "
            f"({words(error)}); give it __len__, or mpitrain.Stream(data, samples)"
        ) from error
    if not count:
        raise DataError(f"{what} has no samples")
    found = given.samples(job.run.dtype, job.run.seed)
    if isinstance(found, Streamed) and job.data.workers > 1 and not hasattr(data, "starting_at"):
        raise DataError(
            f"data.workers = {job.data.workers}: each process would read all of {what}, which is "
            "read in turn; take 1, or give it starting_at(number), which begins at a sample"
        )
    return found


def _scores(layers: Mapping[str, nn.Layer] | None, data: Dataset) -> int:
    """Number of the last layer's scores; 0 if labels are as many numbers as outputs.

    Scores are the last axis, or as torch has them for several labels a sample, the first one.
    """
    if layers is None:
        raise DataError("labels are integers, and nothing says of how many classes: give classes=")
    try:
        shape = nn.Chain(layers).output_shape(data.input_shape)
    except ValueError as error:
        raise DataError(f"model: {error}") from error
    if isinstance(shape, Fields) or prod(shape) == prod(data.label_shape):
        return 0
    return shape[0 if shape[1:] == data.label_shape else -1]


def _kinds(array: Array, varies: bool) -> dict[str, object]:
    parts = described(array, varies=varies).items()
    return {name: (kind if name else kind.kind, size) for name, (kind, size) in parts}
