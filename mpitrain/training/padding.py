"""Check that padding has no part in results, as layouts pad samples in other company."""

from collections.abc import Sequence
from functools import partial
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.data import DataError, Samples
from mpitrain.data.sampler import OwnOrder
from mpitrain.data.stream import Streamed
from mpitrain.objective import reduction_of
from mpitrain.objective.metrics import Metric
from mpitrain.ranks.together import together

if TYPE_CHECKING:
    from mpitrain.training.parts import Parts

#: Samples of which the shortest and the longest are tried.
_FEW = 8


class _Tried(NamedTuple):
    """A short and a long sample, in one batch and each alone, and their numbers."""

    both: Samples
    apart: tuple[Samples, Samples]
    numbers: tuple[int, int]


class Padding:
    """Compares results of a short and a long sample together with those of both apart.

    It does so when the trainer is made, and before steps 2, 4, 8 and so on with samples of their
    batches: lengths that differ may be rare, and outputs that are 0 at first show nothing.  A
    stream is tried with its first samples, as reading others would begin it anew.  All methods are
    collective.  Cost of a look: reading at most 8 samples in all and 8 on each rank, and three
    forward passes.
    """

    def __init__(self, parts: "Parts") -> None:
        """Look at samples in the order of the first epoch, or at some of all; errors of look()."""
        self._parts, self._steps, self._most = parts, 0, dict[str, float]()
        self._tried: _Tried | None = None
        own, count = parts.config, len(parts.data.train)
        self._are_in_step = not (own.server.ranks or own.server.hogwild)
        if isinstance(parts.data.train, Streamed):
            some = np.arange(min(_FEW, count))
        elif isinstance(parts.sampler, OwnOrder) and parts.sampler.gives_batches:
            some = _spread(next(parts.sampler.batches(0)))
        else:
            some = _spread(np.arange(count))
        self._choose(some)
        self._compare()

    def look(self, batch: Array) -> None:
        """Look at the samples of a step's batch, if it is due; ConfigError if results differ."""
        self._steps += 1
        if not self._are_in_step or self._steps < 2 or self._steps & (self._steps - 1):
            return
        if not isinstance(self._parts.data.train, Streamed):
            self._choose(_spread(batch))
        self._compare()

    def _choose(self, some: Array) -> None:
        """Take the shortest and the longest of these samples, if they differ.

        A batch must not change samples of one length: DataError on all ranks.
        """
        comm, train = self._parts.comm, self._parts.data.train
        mine = some[comm.rank :: comm.size].tolist()
        if isinstance(train, Streamed):  # each rank reads the whole stream up to its samples
            mine = some.tolist()
        found = together(comm, lambda: [(_length(train[[i]]), i) for i in mine], DataError)
        every = [pair for pairs in comm.allgather(found) for pair in pairs]
        (least, short), (most, long) = min(every), max(every)

        def read() -> _Tried:
            apart = train[[short]], train[[long]]
            found = _Tried(train[[short, long]], apart, (short, long))
            if least == most and not cast(Any, train).outline()[2]:  # draws are reported elsewhere
                _expect_alone(found, train[[short, long]])
            return found

        tried = together(comm, read, DataError)
        self._tried = tried if least < most else self._tried

    def _compare(self) -> None:
        if self._tried is None:
            return
        parts, tried = self._parts, self._tried
        state = parts.model.state(parts.config.run.dtype)
        if any(name.endswith("running_mean") for name in state):
            raise ConfigError(
                "model: batch norm averages over padding, too; take LayerNorm or GroupNorm, or pad "
                "all samples to one length"
            )
        both, *apart = (self._outputs(samples) for samples in (tried.both, *tried.apart))
        kind = np.dtype(parts.passes.dtype)
        least = np.finfo(kind if kind.kind == "f" else np.float16).eps
        rounding = max(least**0.5, 1e-6)  # a float64 model may compute its loss in float32
        own = [(f"metrics: {n}", m) for n, m in parts.metrics.items() if hasattr(m, "add")]
        metrics = {name: partial(_measured, metric) for name, metric in own}

        def compare() -> None:
            every = {"collate_fn: the loss": self._loss} | metrics
            for name, of in every.items() if both is not None else ():
                whole = of([(both, tried.both.labels)])
                separate = of([(y, one.labels) for y, one in zip(apart, tried.apart, strict=True)])
                # Late in training, losses may be as small as rounding.
                most = self._most[name] = max(self._most.get(name, 0.0), abs(separate))
                if isfinite(separate) and not abs(whole - separate) <= rounding * most:
                    short, long = tried.numbers
                    raise ConfigError(
                        f"{name} of samples {short} and {long} is {whole:.6g} in one batch and "
                        f"{separate:.6g} in two, as padding has a part in it, so that each layout "
                        "would have another one; leave it out by a mask in the model, and by a "
                        "loss and metrics that give (sum, count) of what counts, or pad all "
                        "samples to one length"
                    )

        together(parts.comm, compare, ConfigError)

    def _loss(self, results: Sequence[tuple[Any, Array]]) -> float:
        """The loss of two samples, which may be in two batches."""
        loss, total, counted = self._parts.model.loss, 0.0, 0.0
        if getattr(loss, "several", 0):
            return _measured(cast(Metric, loss), results)
        for outputs, labels in results:
            is_mean = reduction_of(loss) == "mean"
            told: Any = loss(outputs, labels, 2 * prod(labels.shape[1:]) if is_mean else 1.0)
            total += float(told[0])
            counted += float(told[2]) if len(told) > 2 else 0.0
        return total / (counted or 1.0)

    def _outputs(self, samples: Samples) -> Array | None:
        """Outputs of the last stage; None on ranks that do not have it."""
        passes = self._parts.passes
        return passes.through(passes.taken(samples.inputs))


def _spread(numbers: Array) -> Array:
    """A few of these numbers, from the first to the last one."""
    places = np.linspace(0, len(numbers) - 1, min(_FEW, len(numbers)))
    return np.asarray(numbers)[places.astype(np.int64)]


def _expect_alone(tried: _Tried, again: Samples) -> None:
    """DataError: a batch mixes two samples, as mixup does, alike each time."""
    for key, both in vars(tried.both).items():
        alone = [getattr(one, key) for one in tried.apart]
        apart, once = b"".join(one.tobytes() for one in alone), both.tobytes()
        if once != apart and once == getattr(again, key).tobytes():
            short, long = tried.numbers
            raise DataError(
                f"collate_fn gives other {key} for samples {short} and {long} in one batch than "
                "for each alone, and each layout would have others; mix samples in the data set, "
                "whose item may take another one, too"
            )


def _length(samples: Samples) -> int:
    return sum(array.nbytes for array in vars(samples).values())


def _measured(metric: Metric, results: Sequence[tuple[Any, Array]]) -> float:
    """A metric of samples in some batches."""
    return metric.value(np.sum([metric.add(*one) for one in results], axis=0))
