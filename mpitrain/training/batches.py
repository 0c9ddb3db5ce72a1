"""Micro-batches of one or several steps: inputs for the first stage, labels for the last."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.arrays import Array, Scalar, is_floating
from mpitrain.data.dataset import Samples
from mpitrain.device import HOST, Device
from mpitrain.fields import fields
from mpitrain.group import share
from mpitrain.nn.context import Terms
from mpitrain.objective import LossFunction, reduction_of

if TYPE_CHECKING:
    from mpitrain.nn.positions import Positions
    from mpitrain.nn.rows import Rows


def part(batches: Sequence[Array], parts: int, micro_batch: int) -> Array:
    """Indices of the samples in micro-batch ``m``: part ``m % parts`` of batch ``m // parts``.

    The batches are global: the contents of a micro-batch do not depend on the rank that takes it.
    The sizes of parts differ by one sample at most.
    """
    batch, own = divmod(micro_batch, parts)
    whole = batches[batch]
    return whole[share(len(whole), own, parts)]


def _ahead(
    device: Device, micro_batches: Sequence[int], read: Callable[[int], Array]
) -> Callable[[int], Array]:
    """Copies each micro-batch's array to the device while the micro-batch before is computed.

    ``micro_batches``: their numbers, in the order of the calls.
    """
    following, coming = dict(pairwise(micro_batches)), dict[int, Callable[[], Array]]()

    def found(micro_batch: int) -> Array:
        here = coming.pop(micro_batch, None) or device.ahead(read(micro_batch))
        array = here()
        if (after := following.get(micro_batch)) is not None:
            coming[after] = device.ahead(read(after))
        return array

    return found


@dataclass
class MicroBatches:
    """Inputs, labels and the loss of micro-batches that were read; nothing is on the device yet.

    Attributes:
        held: samples of the micro-batches that the first or last stage needs, in its order.
        batches: sample indices of each batch.
        parts: micro-batches of each batch.
        judge: the loss, for the last stage.
        labels_per_sample: labels of a sample, or of the first one; the loss is a mean over them,
            too.
        dtype: type of floating-point inputs.
        scale: factor on the loss before its gradient is taken.
        device: where the arrays go.
        cut: the cut of the positions of inputs and labels, or of the rows of inputs; ranks with
            rows have all labels, and take an equal part of each one's loss.
        labels_taken, counted: number of the labels of which :meth:`loss` was taken, and what counts
            in them; 0 unless the loss is a mean over what counts.
        unequal: sum of the differences between both in single micro-batches.
        counting: part of the batch's labels that counts, where layers add losses to a mean over
            what counts and all ranks know it before they begin; else None.
    """

    held: Mapping[int, Samples]
    batches: Sequence[Array]
    parts: int
    judge: LossFunction
    labels_per_sample: int = 1
    dtype: Any = None
    scale: float = 1.0
    device: Device = HOST
    cut: "Positions | Rows | None" = None
    labels_taken: int = 0
    counted: Scalar = 0.0
    unequal: Scalar = 0.0
    counting: float | None = None

    def __post_init__(self) -> None:
        self._cuts_labels = self.cut is not None and self.cut.cuts_labels
        self._copies = 1 if self.cut is None or self._cuts_labels else self.cut.group.size
        #: Inputs for the first stage, and labels for the last one.
        self.inputs = _ahead(self.device, list(self.held), self._host_inputs)
        self.labels = _ahead(self.device, list(self.held), self._host_labels)

    def samples(self, micro_batch: int) -> int:
        """Number of samples in a micro-batch."""
        return len(self.indices(micro_batch))

    def loss(self, micro_batch: int, outputs: Array) -> tuple[Scalar, Array]:
        """The micro-batch's part of the batch's mean loss, and the gradient of ``scale`` times it.

        The gradient is by ``outputs``.  Both are divided by the number of the batch's labels, also
        where the loss is a mean over what counts: that is known once all ranks have taken theirs.
        """
        reduction, labels = reduction_of(self.judge), self.labels(micro_batch)
        each = self.labels_of_sample(micro_batch)
        whole = len(self.batches[micro_batch // self.parts]) * each
        divisor = (1 if reduction == "sum" else whole) * self._copies / self.scale
        scaled, gradient, *counted = self.judge(outputs, labels, divisor)
        if reduction == "count":
            taken = labels.size if self._cuts_labels else len(self.indices(micro_batch)) * each
            count = self.device.number(counted[0])
            self.labels_taken += taken
            self.counted = self.counted + count
            self.unequal = self.unequal + abs(count - taken)
        return self.device.number(scaled) / self.scale, gradient

    def labels_of_sample(self, micro_batch: int) -> int:
        """Number of labels of a sample, on all ranks that share its positions.

        A mean is one over samples, whatever their sizes are in the micro-batch.
        """
        if reduction_of(self.judge) != "mean":
            return self.labels_per_sample
        return prod(self.held[micro_batch].labels.shape[1:])

    def terms(self, micro_batch: int) -> Terms:
        """Terms of the loss that layers add, divided as :meth:`loss` divides.

        They are means over samples, also where the whole is divided by what counts afterwards.
        """
        is_sum = reduction_of(self.judge) == "sum"
        samples = 1 if is_sum else len(self.batches[micro_batch // self.parts])
        counting = 1.0 if self.counting is None else self.counting
        return Terms(counting / samples, self.scale)

    def held_labels(self) -> list[Array]:
        """Labels of this rank's micro-batches that have samples."""
        return [self._host_labels(number) for number in self.held if self.samples(number)]

    def indices(self, micro_batch: int) -> Array:
        """Indices of a micro-batch's samples in the data set."""
        return part(self.batches, self.parts, micro_batch)

    def unfit(self, batch: int = 0) -> str:
        """Description of the first sample of a batch on this rank that is not finite, or ""."""
        for micro_batch in self.held:
            if micro_batch // self.parts != batch:
                continue
            for what, values in (
                ("inputs", self._host_inputs(micro_batch)),
                ("labels", self._host_labels(micro_batch)),
            ):
                if (found := _first_unfit(values)) is not None:
                    row, value = found
                    number = self.indices(micro_batch)[row]
                    return f"the {what} of sample {number} to train on hold {value}"
        return ""

    def _host_inputs(self, micro_batch: int) -> Array:
        inputs = self.held[micro_batch].inputs
        if self.cut is not None:
            inputs = inputs[:, self.cut.own]
        if self.dtype is not None and inputs.dtype.kind == "f":
            inputs = inputs.astype(self.dtype, copy=False)
        return inputs

    def _host_labels(self, micro_batch: int) -> Array:
        labels = self.held[micro_batch].labels
        return labels[:, self.cut.own] if self.cut and self._cuts_labels else labels


def _first_unfit(values: Array) -> tuple[int, str] | None:
    """The first sample with a number that is not finite, and that number; None: all are finite."""
    for part in fields(values).values():
        if is_floating(part.dtype) and part.size:
            rows = part.reshape(len(part), -1)
            bad = ~np.isfinite(rows)
            if bad.any():
                row = int(bad.any(axis=1).argmax())
                return row, f"{rows[row][bad[row]][0]} ({part.dtype})"
    return None
