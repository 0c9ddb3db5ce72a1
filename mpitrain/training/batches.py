"""The micro-batches of one or several steps, as the stages at both ends need them."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpitrain.arrays import Array, Scalar, is_floating
from mpitrain.data.dataset import Samples
from mpitrain.device import HOST, Device
from mpitrain.fields import fields
from mpitrain.group import share
from mpitrain.objective import LossFunction


def part(batches: Sequence[Array], parts: int, micro_batch: int) -> Array:
    """Indices of a micro-batch's samples: part ``m % parts`` of batch ``m // parts``.

    The batches are global: which rank takes which micro-batch has no part in what they hold.
    Parts differ by one sample.
    """
    batch, own = divmod(micro_batch, parts)
    whole = batches[batch]
    return whole[share(len(whole), own, parts)]


class _Ahead:
    """Arrays of micro-batches on the device, each brought while the one before it is computed."""

    def __init__(
        self, device: Device, micro_batches: Sequence[int], read: Callable[[int], Array]
    ) -> None:
        """``micro_batches``: in the order in which they will be asked for."""
        self._device = device
        self._read = read
        self._next = dict(pairwise(micro_batches))
        self._coming: dict[int, Callable[[], Array]] = {}

    def __call__(self, micro_batch: int) -> Array:
        here = self._coming.pop(micro_batch, None) or self._begin(micro_batch)
        found = here()
        if (following := self._next.get(micro_batch)) is not None:
            self._coming[following] = self._begin(following)
        return found

    def _begin(self, micro_batch: int) -> Callable[[], Array]:
        return self._device.ahead(self._read(micro_batch))


class MicroBatches:
    """Inputs, labels and the loss of micro-batches that were read."""

    def __init__(
        self,
        held: Mapping[int, Samples],
        batches: Sequence[Array],
        parts: int,
        loss: LossFunction,
        *,
        labels_per_sample: int = 1,
        dtype: Any = None,
        scale: float = 1.0,
        device: Device = HOST,
    ) -> None:
        """Describe them.

        Args:
            held: the samples of those micro-batches that the first or the last stage needs, in the
                order in which it does.
            batches: sample indices of each batch.
            parts: micro-batches of each batch.
            loss: the loss, for the last stage.
            labels_per_sample: over which the loss is a mean, too.
            dtype: type of floating-point inputs.
            scale: factor on the loss before its gradient is taken.
            device: where the arrays go.
        """
        self._held = held
        self._batches = batches
        self._parts = parts
        self._loss = loss
        self._labels_per_sample = labels_per_sample
        self._dtype = dtype
        self._scale = scale
        self._device = device
        #: Inputs for the first stage, and labels for the last one.
        self.inputs = _Ahead(device, list(held), self._host_inputs)
        self.labels = _Ahead(device, list(held), lambda micro_batch: held[micro_batch].labels)

    def samples(self, micro_batch: int) -> int:
        """How many it has."""
        return len(self.indices(micro_batch))

    def loss(self, micro_batch: int, outputs: Array) -> tuple[Scalar, Array]:
        """Its part of the batch's mean loss, and the gradient of ``scale`` times that."""
        batch = self._batches[micro_batch // self._parts]
        divisor = len(batch) * self._labels_per_sample / self._scale
        scaled, gradient = self._loss(outputs, self.labels(micro_batch), divisor)
        return self._device.number(scaled) / self._scale, gradient

    def indices(self, micro_batch: int) -> Array:
        """Numbers of its samples."""
        return part(self._batches, self._parts, micro_batch)

    def unfit(self, batch: int = 0) -> str:
        """The first sample of a batch on this rank that is not finite; empty: there is none."""
        for micro_batch, samples in self._held.items():
            if micro_batch // self._parts != batch:
                continue
            for what, values in (
                ("inputs", self._host_inputs(micro_batch)),
                ("labels", samples.labels),
            ):
                if (found := _first_unfit(values)) is not None:
                    row, value = found
                    number = self.indices(micro_batch)[row]
                    return f"the {what} of sample {number} to train on hold {value}"
        return ""

    def _host_inputs(self, micro_batch: int) -> Array:
        inputs = self._held[micro_batch].inputs
        if self._dtype is not None and inputs.dtype.kind == "f":
            inputs = inputs.astype(self._dtype, copy=False)
        return inputs


def _first_unfit(values: Array) -> tuple[int, str] | None:
    """The first sample with a number that is not finite, and what it is."""
    for part in fields(values).values():
        if is_floating(part.dtype) and part.size:
            rows = part.reshape(len(part), -1)
            bad = ~np.isfinite(rows)
            if bad.any():
                row = int(bad.any(axis=1).argmax())
                return row, f"{rows[row][bad[row]][0]} ({part.dtype})"
    return None
