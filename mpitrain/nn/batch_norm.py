"""Batch norm (Ioffe & Szegedy 2015) over the batch of all replicas."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpitrain.arrays import Array, Parameters, Shape, array_namespace
from mpitrain.group import TensorGroup
from mpitrain.nn.context import RESTING, Context
from mpitrain.nn.layer import Elementwise, Initial, Verdict, widened
from mpitrain.nn.sizes import expect_features, expect_sizes

#: Why a batch is refused in training; it names the norm.
SINGLE = (
    "batch norm {} has a single value a channel, as a batch of one sample gives it, and no "
    "variance; change train.batch_size, or set drop_last=True"
)


class BatchNorm(Elementwise):
    """``y = (x - mean) / sqrt(variance + epsilon) * weight + bias`` of each channel, the last axis.

    In training, mean and variance are over a micro-batch of each replica: the same as in one
    process with as many micro-batches.  In tests, running values take their place.

    Attributes:
        momentum: weight of a micro-batch in the running values.
        copies: replicas that have the same samples, as ranks behind the images that they share.
    """

    sees = mixes = True
    by_point = True
    copies = 1

    def __init__(self, channels: int, epsilon: float = 1e-5, momentum: float = 0.1) -> None:
        """``channels``: size of the last axis, before and after; ``ValueError`` below 1."""
        expect_sizes("BatchNorm", channels=channels)
        self.channels = channels
        self.epsilon = epsilon
        self.momentum = momentum
        self._verdict = Verdict()

    def verdicts(self) -> list[Verdict]:
        return [self._verdict]

    def initial(self) -> Mapping[str, Initial]:
        shape = (self.channels,)
        return {"weight": Initial(shape, mean=1.0), "bias": Initial(shape)}

    def state(self, dtype: DTypeLike) -> dict[str, Array]:
        return {
            "running_mean": np.zeros(self.channels, dtype),
            "running_var": np.ones(self.channels, dtype),
        }

    def output_shape(self, shape: Shape) -> Shape:
        expect_features("batch norm", self.channels, shape)
        return shape

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, Any]:
        rows = widened(x).reshape(-1, self.channels)
        xp = array_namespace(rows)
        count: Array | None = None
        if context.training:
            count, mean, squares = moments(rows, context.replicas)
            if (count == self.copies).any():
                self._verdict.say(ValueError(SINGLE.format(".".join(context.path) or "layer")))
            variance = squares / xp.maximum(count, 1)
            if not context.again:
                squares, each = squares / self.copies, count / self.copies
                follow(context.state, mean, squares, each, self.momentum)
        else:
            drawn = self.state(rows.dtype)
            state = context.state or {name: xp.asarray(value) for name, value in drawn.items()}
            mean, variance = state["running_mean"], state["running_var"]
        scale = 1 / xp.sqrt(variance + self.epsilon)
        normal = ((rows - mean) * scale).astype(rows.dtype, copy=False)
        y = normal * parameters["weight"] + parameters["bias"]
        saved = (normal, scale, count, context.replicas)
        return y.astype(x.dtype, copy=False).reshape(x.shape), saved

    def backward(self, parameters: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        normal, scale, count, replicas = saved
        rows = widened(dy).reshape(-1, self.channels)
        xp, dx = array_namespace(rows), rows
        sums = xp.stack([rows.sum(axis=0), (rows * normal).sum(axis=0)])
        if count is not None:  # mean and variance depend on all rows
            mean, along = replicas.sum(sums.astype(np.float64)) / xp.maximum(count, 1)
            dx = rows - mean - normal * along
        dx = scale * parameters["weight"] * dx
        return dx.astype(dy.dtype, copy=False).reshape(dy.shape), sums

    def gradients(self, parameters: Parameters, kept: Any) -> dict[str, Array]:
        kind = parameters["weight"].dtype
        return {"bias": kept[0].astype(kind), "weight": kept[1].astype(kind)}


class OtherNorm(Exception):
    """Replicas call different norms at the same time, which have no batch in common."""


def moments(rows: Array, replicas: TensorGroup, number: int = 0) -> tuple[Array, Array, Array]:
    """Number of rows of all replicas, their mean, and the sum of squared distances from the mean.

    All have shape (channels,).  Each replica computes them from its own rows, which keeps digits;
    they are combined in rank order (Chan et al. 1979).  Cost: one all-gather of three numbers a
    channel, and one.

    Raises:
        OtherNorm: on all replicas, some of which call the norm of another ``number``.
    """
    xp = array_namespace(rows)
    own = xp.zeros((3, rows.shape[1]))
    if len(rows):
        own[0] = len(rows)
        own[1] = rows.mean(axis=0, dtype=np.float64)
        own[2] = ((rows - own[1]) ** 2).sum(axis=0, dtype=np.float64)
    every = replicas.all(xp.concatenate([own.reshape(-1), xp.full(1, float(number))]))
    if replicas.size > 1 and (every[:, -1] != every[0, -1]).any():
        raise OtherNorm
    count, mean, squares = xp.zeros((3, rows.shape[1]))
    for n, theirs, distances in every[:, :-1].reshape(-1, *own.shape):
        # A replica without rows changes nothing.
        apart, whole = theirs - mean, count + n
        most = xp.maximum(whole, 1)
        mean = mean + apart * (n / most)
        squares = squares + distances + apart**2 * (count * n / most)
        count = whole
    return count, mean, squares


def follow(state: Any, mean: Array, squares: Array, count: Array, momentum: float) -> None:
    """Move the running values after a micro-batch; the variance is unbiased, as in torch."""
    if state:
        xp = array_namespace(mean)
        part = xp.where(count > 0, momentum, 0.0)
        now = {"running_mean": mean, "running_var": squares / xp.maximum(count - 1, 1)}
        for name, value in now.items():
            state[name] += part * (value - state[name])
