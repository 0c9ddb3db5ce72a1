"""Check that padding has no part in the loss, as layouts pad samples in other company."""

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain import nn
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.data import DataError, Samples
from mpitrain.data.stream import Streamed
from mpitrain.objective import reduction_of
from mpitrain.ranks.together import together

if TYPE_CHECKING:
    from mpitrain.training.parts import Parts

#: Samples of which the shortest and the longest are tried.
_FEW = 8


def expect_unseen(parts: "Parts") -> None:
    """Compare the loss of a short and a long sample together with those of both apart; collective.

    Nothing is tried where a few samples have one size.  Cost: three forward passes.

    Raises:
        ConfigError: on all ranks: the losses differ, or there is batch norm.
        DataError: on all ranks: a rank cannot read a sample.
    """
    train = parts.data.train
    count = min(_FEW, len(train))
    some = np.arange(count)
    if not isinstance(train, Streamed):
        some = np.linspace(0, len(train) - 1, count).astype(np.int64)
    lengths = together(parts.comm, lambda: [_length(train[[i]]) for i in some], DataError)
    short, long = some[np.argmin(lengths)], some[np.argmax(lengths)]
    if min(lengths) == max(lengths):
        return
    state = nn.Chain(parts.model.layers).state(parts.config.run.dtype)
    if any(name.endswith("running_mean") for name in state):
        raise ConfigError(
            "model: batch norm averages over padding, too; take LayerNorm or GroupNorm, or pad all "
            "samples to one length"
        )
    both, *apart = (_part(parts, which, 2) for which in ([short, long], [short], [long]))

    def compare() -> None:
        if both is None:
            return
        together_, separate = _mean([both]), _mean([part for part in apart if part])
        kind = np.dtype(parts.passes.dtype)
        least = np.finfo(kind if kind.kind == "f" else np.float16).eps
        if not abs(together_ - separate) <= least**0.5 * abs(separate):
            raise ConfigError(
                f"collate_fn: the loss of samples {short} and {long} is {together_:.6g} in one "
                f"batch and {separate:.6g} in two, as padding has a part in it, so that each "
                "layout would train another model; leave it out by a mask in the model, and by a "
                "loss that gives (sum, count) of what counts, or pad all samples to one length"
            )

    together(parts.comm, compare, ConfigError)


def _mean(parts: list[tuple[float, float]]) -> float:
    return sum(value for value, _ in parts) / (sum(count for _, count in parts) or 1.0)


def _length(samples: Samples) -> int:
    return sum(array.nbytes for array in vars(samples).values())


def _part(parts: "Parts", which: list[int], of: int) -> tuple[float, float] | None:
    """Part of these samples in the loss of ``of`` samples, and what counts; collective.

    None on ranks that do not have the loss.
    """
    samples = together(parts.comm, lambda: parts.data.train[which], DataError)
    y: Any = samples.inputs
    if y.dtype.kind == "f":
        y = y.astype(parts.passes.dtype)
    found: Array | None = None
    for rank, forward in parts.passes.probes():

        def act(x: Array = y, forward: Any = forward) -> Array | None:
            return forward(x) if forward else None

        found = together(parts.comm, act, ConfigError, DataError, RuntimeError, TypeError)
        y = parts.comm.bcast(found, rank)
    if found is None:
        return None
    loss, labels = parts.model.loss, samples.labels
    is_mean = reduction_of(loss) == "mean"
    told: Any = loss(found, labels, of * prod(labels.shape[1:]) if is_mean else 1.0)
    return float(told[0]), float(told[2]) if len(told) > 2 else 0.0
