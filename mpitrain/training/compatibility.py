"""Checks that data, model and loss of a job fit together; the model's initial values."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mpitrain.arrays import Array, Shape
from mpitrain.config import Config, ConfigError, Evaluate, expect
from mpitrain.config.metric_names import refusal, usual
from mpitrain.data import DataError, Dataset, Samples
from mpitrain.fields import Fields
from mpitrain.models import SequentialModel
from mpitrain.objective import LossFunction
from mpitrain.objective.metrics import ClassesFirst, Metric, OwnPerplexity, build

if TYPE_CHECKING:
    from mpitrain.training.parts import Parts
from mpitrain import extras


def expect_fitting(model: SequentialModel, data: Dataset) -> Shape:
    """The outputs' shape for a sample; ConfigError if data, model and loss do not fit together."""
    try:
        outputs = model.output_shape(data.input_shape)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    try:
        model.loss.expect(outputs, data.label_shape, data.label_dtype)
    except ValueError as error:
        raise ConfigError(f"loss: {error}") from error
    return outputs


def expect_values(
    model: SequentialModel, classes: int, of: str, samples: Samples, numbers: Array | None = None
) -> None:
    """Raise DataError if an input or a label is outside of its range, and name its sample.

    Inputs of an embedding are rows of its table; a label is a class, or a number from 0 to 1.

    Args:
        model: the model; labels that are the ``ignore_index`` of its loss may lie anywhere.
        classes: number of classes; 0: labels are numbers, which binary_cross_entropy takes from 0
            to 1.
        of: the part of the data set, ``"train"`` or ``"test"``.
        samples: samples of this part.
        numbers: numbers of these samples in the part; None: they are the whole part.
    """
    loss, inputs, limit = model.loss, samples.inputs, model.choices
    is_table = limit > 0 and inputs.dtype.kind in "iu" and inputs.size
    if is_table and (inputs.min() < 0 or inputs.max() >= limit):
        flat = inputs.reshape(len(inputs), -1)
        at, column = np.argwhere((flat < 0) | (flat >= limit))[0]
        raise DataError(
            f"sample {at if numbers is None else numbers[at]} to {of} on holds the input "
            f"{flat[at, column]}, and the model's table has the rows 0 to {limit - 1}; correct "
            "the sample, or ask for more rows by classes=, data.vocabulary or data.rows"
        )
    labels, is_binary = samples.labels, extras.BinaryCrossEntropy.made(loss)
    if not labels.size or not (is_binary or (classes and labels.dtype.kind in "iub")):
        return
    most = 1 if is_binary else classes - 1
    if labels.min() >= 0 and labels.max() <= most:  # false if a label is not a number
        return
    rows = labels.reshape(len(labels), -1)
    bad = ~((rows >= 0) & (rows <= most)) & (rows != ignored_by(loss))
    if not bad.any():
        return
    row = int(bad.any(axis=1).argmax())
    wrong = rows[row][bad[row]][0]
    if is_binary:
        why = (
            "binary_cross_entropy takes numbers from 0 to 1; write 0 in the place of -1, for "
            "example, or set loss.name = 'mean_squared_error'"
        )
    elif wrong >= 0:
        why = (
            f"labels of {classes} classes lie from 0 to {most}; give classes=, or floating-point "
            "numbers where they are no classes"
        )
    else:
        why = (
            f"labels of {classes} classes lie from 0 to {most}; for labels that do not count, set "
            "loss.ignore_index, give a loss with ignore_index, or give a dictionary of labels and "
            "a loss that returns (sum, count)"
        )
    raise DataError(
        f"sample {row if numbers is None else numbers[row]} to {of} on has the label {wrong}, and "
        f"{why}"
    )


def ignored_by(loss: LossFunction) -> int | None:
    """The value of labels that do not count in a loss and its metrics; None: all labels count."""
    found: int | None = getattr(loss, "ignore_index", None)
    return found


def expect_values_in_memory(model: SequentialModel, data: Dataset) -> None:
    """Raise DataError if the model or its loss does not take a sample in memory."""
    for of, samples in (("train", data.train), ("test", data.test)):
        if isinstance(samples, Samples):
            expect_values(model, data.classes, of, samples)


def expect_untested(job: Config, metrics: Mapping[str, Metric] | None) -> None:
    """Raise ConfigError if a job without samples to test on has a setting that needs tests."""
    usual = Evaluate()
    asked = {
        "metrics": metrics,
        "checkpoint.best": job.checkpoint.best,
        "evaluate.patience": job.evaluate.patience,
        "evaluate.metrics": job.evaluate.metrics,
        "evaluate.every": job.evaluate.every != usual.every,
        "evaluate.watch": job.evaluate.watch != usual.watch,
    }
    if found := [name for name, value in asked.items() if value]:
        raise ConfigError(
            f"{', '.join(found)}: this goes by tests, and the job has nothing to test on; give "
            "test_data, or leave it out"
        )


def whole_state(parts: "Parts") -> dict[str, Array]:
    """Layers' initial state besides parameters, by name; ConfigError if layouts would change it."""
    found = parts.model.state(parts.config.run.dtype)
    if (found or parts.model.mixes) and max(parts.grid.layout.replicas) > 1:
        expect(parts.config, "batch-norm")
    return found


def named_metrics(parts: "Parts", outputs: Shape) -> dict[str, Metric]:
    """The metrics that a job asks for, by name, or the usual metrics of its loss.

    A job without samples to test on has none; ``outputs`` is the shape of the outputs for a sample.
    If the program brings the loss, ``loss.name`` does not count.  ConfigError: a metric does not
    take such outputs or labels.
    """
    job, data = parts.config, parts.data
    if data.test is None:
        return {}
    name, asked = job.loss.name, job.evaluate.metrics
    if isinstance(outputs, Fields) or data.label_dtype.kind == "V":
        names = outputs.dtype.names or () if isinstance(outputs, Fields) else ()
        if asked == ("perplexity",) and "loss_count" in names:
            return {"perplexity": OwnPerplexity()}
        if asked:
            raise ConfigError(
                f"evaluate.metrics: {asked[0]} takes one output and one label, and there are "
                "several; give functions of them as metrics"
            )
        return {}
    if parts.objects.loss is not None and not data.classes:
        name = "mean_squared_error"
        for metric in asked:
            if why := refusal(metric, name):
                raise ConfigError(f"evaluate.metrics: labels are numbers, and {why}")
        if not asked and outputs != data.label_shape:
            return {}
    ignored, of = ignored_by(parts.model.loss), data.label_shape
    may_be_first = bool(parts.objects.loss and data.classes and of) and outputs[1:] == of
    if may_be_first and outputs[:-1] == of:
        if asked:
            raise ConfigError(
                f"evaluate.metrics: outputs of shape {outputs} have as many classes as labels, and "
                "nobody knows along which axis they lie; give functions as metrics"
            )
        return {}
    found = build(asked or usual(name), name, data.classes, parts.model.group, ignored)
    if may_be_first:
        return {name: ClassesFirst(one) for name, one in found.items()}
    return found


def initial(parts: "Parts") -> Array:
    """Initial parameters of this rank's layers, shape (arena.size,).

    Only one layer's whole parameters are in memory at a time.  ConfigError: they do not fit into
    memory, or have not the shapes that a layer promised.
    """
    run, model, layers = parts.config.run, parts.model, parts.layers
    try:
        flat = _room(parts.arena.size, run.dtype)
        for index, name in enumerate(layers):
            drawn = model.drawn(name, run.seed, np, run.dtype)
            try:
                parts.arena.fill(flat, index, drawn)
            except ValueError as error:
                raise ConfigError(f"model: layer {name}: {error}") from error
    except MemoryError as error:
        raise ConfigError(
            f"model: the parameters of {', '.join(layers)} do not fit into memory ({error}); make "
            "the model smaller, or spread it over more ranks"
        ) from error
    return flat


def _room(size: int, dtype: str) -> Array:
    try:
        return np.empty(size, dtype)
    except ValueError as error:  # the array has more bytes than addresses can count
        raise MemoryError(str(error)) from error
