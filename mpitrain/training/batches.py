"""Micro-batches of one or several steps: inputs for the first stage, labels for the last."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
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


class _Ahead:
    """Copies each micro-batch's array to the device while the micro-batch before is computed."""

    def __init__(
        self, device: Device, micro_batches: Sequence[int], read: Callable[[int], Array]
    ) -> None:
        """``micro_batches``: their numbers, in the order of the calls."""
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
    """Inputs, labels and the loss of micro-batches that were read.

    Attributes:
        labels_taken, counted: what was expected to count in the labels of which :meth:`loss` was
            taken, their number unless :meth:`know_counts` says more, and what counts in them; 0
            unless the loss is a mean over what counts.
        unequal: sum of the differences between both in single micro-batches.
    """

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
        cut: "Positions | Rows | None" = None,
    ) -> None:
        """Nothing is copied to the device yet.

        Args:
            held: samples of the micro-batches that the first or last stage needs, in its order.
            batches: sample indices of each batch.
            parts: micro-batches of each batch.
            loss: the loss, for the last stage.
            labels_per_sample: labels of a sample, or of the first one; the loss is a mean over
                them, too.
            dtype: type of floating-point inputs.
            scale: factor on the loss before its gradient is taken.
            device: where the arrays go.
            cut: the cut of the positions of inputs and labels, or of the rows of inputs; ranks with
                rows have all labels, and take an equal part of each one's loss.
        """
        self._held = held
        self._batches = batches
        self._parts = parts
        self._loss = loss
        self._labels_per_sample = labels_per_sample
        self._dtype = dtype
        self._scale = scale
        self._device = device
        self._cut, self._cuts_labels = cut, cut is not None and cut.cuts_labels
        self._copies = 1 if cut is None or cut.cuts_labels else cut.group.size
        self.labels_taken = 0.0
        self.counted: Scalar = 0.0
        self.unequal: Scalar = 0.0
        #: What counts by the labels, in each micro-batch here and for each label of a batch.
        self._counts, self._shares = dict[int, float](), [1.0] * len(batches)
        #: Inputs for the first stage, and labels for the last one.
        self.inputs = _Ahead(device, list(held), self._host_inputs)
        self.labels = _Ahead(device, list(held), self._host_labels)

    def samples(self, micro_batch: int) -> int:
        """Number of samples in a micro-batch."""
        return len(self.indices(micro_batch))

    def know_counts(self, ranks: Communicator, *, has_labels: bool) -> None:
        """Ask the labels what counts in the batches of these ranks; collective where it matters.

        Backward passes see torch's own gradients then.  Where labels do not say it, gradients are
        divided by all labels, and corrected after the step.
        """
        loss: Any = self._loss
        several = getattr(loss, "several", 0)
        if not (several or reduction_of(loss) == "count") or not getattr(loss, "is_counted", False):
            return
        totals = np.zeros((len(self._batches), 1 + (several or 1)))
        for number in filter(self.samples, self._held if has_labels else ()):
            labels = self._host_labels(number)
            found = loss.counts(labels, self._dtype)
            taken = len(labels) if several else self._taken(number, labels)
            self._counts[number] = found[0]
            totals[number // self._parts] += [taken, *found]
        ranks.Allreduce(MPI.IN_PLACE, totals, algorithm="native")
        shares = totals[:, 1:] / np.maximum(totals[:, :1], 1)
        if several:
            loss.shares = shares[0]
        elif (shares > 0).all():  # else nothing counts, or it follows from the outputs
            self._shares = shares[:, 0].tolist()
        else:
            self._counts.clear()

    def _taken(self, micro_batch: int, labels: Array) -> int:
        """Number of labels of a micro-batch here."""
        each = self.labels_of_sample(micro_batch)
        return labels.size if self._cuts_labels else self.samples(micro_batch) * each

    def loss(self, micro_batch: int, outputs: Array) -> tuple[Scalar, Array]:
        """The micro-batch's part of the batch's mean loss, and the gradient of ``scale`` times it.

        The gradient is by ``outputs``.  Both are divided by the number of the batch's labels, or by
        what counts in them where :meth:`know_counts` has found it.
        """
        reduction, labels = reduction_of(self._loss), self.labels(micro_batch)
        batch = micro_batch // self._parts
        whole = len(self._batches[batch]) * self.labels_of_sample(micro_batch) * self._shares[batch]
        divisor = (1 if reduction == "sum" else whole) * self._copies / self._scale
        scaled, gradient, *counted = self._loss(outputs, labels, divisor)
        if reduction == "count":
            taken = self._counts.get(micro_batch, self._taken(micro_batch, labels))
            count = self._device.number(counted[0])
            self.labels_taken += taken
            self.counted = self.counted + count
            self.unequal = self.unequal + abs(count - taken)
        return self._device.number(scaled) / self._scale, gradient

    def labels_of_sample(self, micro_batch: int) -> int:
        """Number of labels of a sample, on all ranks that share its positions.

        A mean is one over samples, whatever their sizes are in the micro-batch.
        """
        if reduction_of(self._loss) != "mean":
            return self._labels_per_sample
        return prod(self._held[micro_batch].labels.shape[1:])

    def terms(self, micro_batch: int) -> Terms:
        """Terms of the loss that layers add: means over samples, or their sums."""
        is_sum = reduction_of(self._loss) == "sum"
        samples = 1 if is_sum else len(self._batches[micro_batch // self._parts])
        return Terms(1 / samples, self._scale)

    def indices(self, micro_batch: int) -> Array:
        """Indices of a micro-batch's samples in the data set."""
        return part(self._batches, self._parts, micro_batch)

    def unfit(self, batch: int = 0) -> str:
        """Description of the first sample of a batch on this rank that is not finite, or ""."""
        for micro_batch in self._held:
            if micro_batch // self._parts != batch:
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
        inputs = self._held[micro_batch].inputs
        if self._cut is not None:
            inputs = inputs[:, self._cut.own]
        if self._dtype is not None and inputs.dtype.kind == "f":
            inputs = inputs.astype(self._dtype, copy=False)
        return inputs

    def _host_labels(self, micro_batch: int) -> Array:
        labels = self._held[micro_batch].labels
        return labels[:, self._cut.own] if self._cut and self._cuts_labels else labels


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
