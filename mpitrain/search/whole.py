"""A whole training: its steps and operations, and the time to its end."""

import sys
from functools import partial

from msgspec.structs import replace

from mpitrain import extras
from mpitrain.config import Config
from mpitrain.data import Sampler
from mpitrain.metrics.words import digits
from mpitrain.optim.lr import Rates
from mpitrain.pipeline.profiles import measure_layers
from mpitrain.search.job import Job, with_samples
from mpitrain.search.layers import layer_costs


def operations(job: Job) -> float | None:
    """Operations of a sample's passes in products of matrices; None: none are known."""
    layers = layer_costs(job.model, job.data.input_shape)
    found = sum(one.forward + one.backward for one in layers)
    if job.is_own and "torch" in sys.modules and len(job.data.train):
        passes = partial(measure_layers, with_samples(job.config, 1), job.model, job.data, 1)
        passes()  # the first of a module are watched, and compute more
        found += extras.counted(passes)
    return float(found) or None


def steps(job: Job, config: Config) -> int:
    """Steps of a job with this config; 0: its samples are not here to be counted."""
    samples, train = len(job.data.train), config.train
    if not samples:
        return train.steps
    every = (job.data.sampler or Sampler)(samples, train.batch_size, 0).steps_per_epoch
    return Rates(config.optim, replace(train, epochs=config.passes), every).total_steps


def to_the_end(job: Job, config: Config, seconds: float) -> list[str]:
    """A line on the whole training, with ``seconds`` a step, if its steps are known."""
    if not (count := steps(job, config)):
        return []
    each = operations(job)
    work = f", {each * config.train.batch_size * count:.3g} operations" if each else ""
    return [f"whole training: {count} steps{work}, {digits(seconds * count / 3600)} hours"]
