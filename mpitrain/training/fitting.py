"""Whether data, model and loss of a job fit together, and with what the model begins."""

from collections.abc import Mapping, Sequence

import numpy as np

from mpitrain.arrays import Array, Shape
from mpitrain.config import Config, ConfigError, Evaluate, Run, expect
from mpitrain.config.metric_names import refusal, usual
from mpitrain.data import DataError, Dataset, Samples
from mpitrain.fields import Fields
from mpitrain.models import SequentialModel
from mpitrain.nn import Chain
from mpitrain.objective import BinaryCrossEntropy, LossFunction
from mpitrain.objective.metrics import Metric, build
from mpitrain.parallel.arena import Arena
from mpitrain.parallel.grid import Layout


def expect_fitting(model: SequentialModel, data: Dataset) -> Shape:
    """Data go through the model, and its outputs with the labels into the loss.

    Returns:
        The shape of the outputs for a sample.

    Raises:
        ConfigError: they do not.
    """
    try:
        outputs = model.output_shape(data.input_shape)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    try:
        model.loss.expect(outputs, data.label_shape, data.label_dtype)
    except ValueError as error:
        raise ConfigError(f"loss: {error}") from error
    return outputs


def expect_labels(
    loss: LossFunction, of: str, samples: Samples, numbers: Sequence[int] | None = None
) -> None:
    """The loss takes the labels' values: binary_cross_entropy numbers from 0 to 1.

    Args:
        loss: the loss.
        of: the part of the data set, ``"train"`` or ``"test"``.
        samples: samples of this part.
        numbers: numbers of these samples in the part; None: they are the whole part.

    Raises:
        DataError: it does not; naming the first sample of which that is so.
    """
    labels = samples.labels
    if not isinstance(loss, BinaryCrossEntropy) or not labels.size:
        return
    if labels.min() >= 0 and labels.max() <= 1:  # false where one of them is not a number
        return
    rows = labels.reshape(len(labels), -1)
    bad = ~((rows >= 0) & (rows <= 1))
    row = int(bad.any(axis=1).argmax())
    raise DataError(
        f"sample {row if numbers is None else numbers[row]} to {of} on has the label "
        f"{rows[row][bad[row]][0]}, and binary_cross_entropy takes numbers from 0 to 1; write 0 "
        "in the place of -1, for example, or set loss.name = 'mean_squared_error'"
    )


def expect_labels_in_memory(loss: LossFunction, data: Dataset) -> None:
    """Check the labels of all samples that are in memory.

    Raises:
        DataError: the loss does not take the labels of one of them.
    """
    for of, samples in (("train", data.train), ("test", data.test)):
        if isinstance(samples, Samples):
            expect_labels(loss, of, samples)


def expect_untested(job: Config, metrics: Mapping[str, Metric] | None) -> None:
    """Nothing in a job without samples to test on goes by tests.

    Raises:
        ConfigError: something does.
    """
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


def expect_single_arrays(model: SequentialModel, data: Dataset) -> None:
    """Check that samples, labels and outputs are one array each, as a GPU needs.

    Raises:
        ConfigError: samples, labels or what a layer gives have several parts.
    """
    shapes = {"samples": data.input_shape, "labels": data.label_shape}
    shape = data.input_shape
    for name, layer in model.layers.items():
        shape = shapes[f"outputs of {name}"] = layer.output_shape(shape)
    for what, found in shapes.items():
        if isinstance(found, Fields):
            raise ConfigError(
                f"run.device: {what} have several parts ({found!r}), which the trainer takes on "
                "the CPU alone; set run.device = 'cpu'"
            )


def whole_state(config: Config, model: SequentialModel, layout: Layout) -> dict[str, Array]:
    """Initial state of the layers besides their parameters.

    Raises:
        ConfigError: it would depend on the layout.
    """
    found = Chain(model.layers).state(config.run.dtype)
    if found and max(layout.replicas) > 1:
        expect(config, "batch-norm")
    return found


def named_metrics(
    job: Config, data: Dataset, model: SequentialModel, outputs: Shape, *, own_loss: bool
) -> dict[str, Metric]:
    """The metrics that a job asks for, or the usual ones of its loss.

    There are none without samples to test on.

    Args:
        job: the job.
        data: data set with the labels.
        model: model with the outputs.
        outputs: shape of the outputs for a sample.
        own_loss: the program brings its loss, whatever the job calls it.

    Raises:
        ConfigError: one of them is of other outputs or labels.
    """
    if data.test is None:
        return {}
    name, asked = job.loss.name, job.evaluate.metrics
    if isinstance(outputs, Fields) or data.label_dtype.kind == "V":
        if asked:
            raise ConfigError(
                f"evaluate.metrics: {asked[0]} is of one output and one label, and there are "
                "several; give functions of them as metrics"
            )
        return {}
    if own_loss and not data.classes:
        name = "mean_squared_error"
        for metric in asked:
            if why := refusal(metric, name):
                raise ConfigError(f"evaluate.metrics: labels are numbers, and {why}")
        if not asked and outputs != data.label_shape:
            return {}
    return build(asked or usual(name), name, data.classes, model.group)


def initial(run: Run, model: SequentialModel, arena: Arena, layers: Sequence[str]) -> Array:
    """The parameters of some layers as they begin, flat; one layer at a time is whole.

    Raises:
        ConfigError: they do not fit into memory, or are not what a layer promised.
    """
    try:
        flat = _room(arena.size, run.dtype)
        for index, name in enumerate(layers):
            drawn = model.initial([name], run.seed, np, run.dtype)[name]
            try:
                arena.fill(flat, index, drawn)
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
    except ValueError as error:  # it has more bytes than addresses can count
        raise MemoryError(str(error)) from error
