"""Micro-batches of one or several steps: inputs for the first stage, labels for the last."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.arrays import Array, Scalar, as_inputs, is_floating
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
        dtype: type of inputs that are numbers; None: they keep their own.
        scale: factor on the loss before its gradient is taken.
        device: where the arrays go.
        cut: the cut of the positions of inputs and labels, or of the rows of inputs; ranks with
            rows have all labels, and take an equal part of each one's loss.
        choices: those of the model.
        labels_taken, counted: what was expected to count in the labels of which :meth:`loss` was
            taken, their number unless :meth:`count_labels` says more, and what counts in them; 0
            unless the loss is a mean over what counts.
        unequal: sum of the differences between both in single micro-batches.
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
    choices: int = 0
    labels_taken: float = 0.0
    counted: Scalar = 0.0
    unequal: Scalar = 0.0

    def __post_init__(self) -> None:
        self._cuts_labels = self.cut is not None and self.cut.cuts_labels
        self._copies = 1 if self.cut is None or self._cuts_labels else self.cut.group.size
        #: Amounts that count by the labels, in each micro-batch here and for each label of a batch.
        self._counts, self._shares = dict[int, float](), [1.0] * len(self.batches)
        #: Inputs for the first stage, and labels for the last one.
        self.inputs = _ahead(self.device, list(self.held), self._host_inputs)
        self.labels = _ahead(self.device, list(self.held), self._host_labels)

    def samples(self, micro_batch: int) -> int:
        """Number of samples in a micro-batch."""
        return len(self.indices(micro_batch))

    def count_labels(self, total: Callable[[Array], None], *, has_labels: bool) -> None:
        """Ask the labels what counts in the batches; collective where it matters.

        ``total`` sums numbers in place over the ranks that share the batches.

        Backward passes see torch's own gradients then.  Where labels do not say it, gradients are
        divided by all labels, and corrected after the step.
        """
        loss: Any = self.judge
        several = getattr(loss, "several", 0)
        if not (several or reduction_of(loss) == "count") or not getattr(loss, "is_counted", False):
            return
        totals = np.zeros((len(self.batches), 1 + (several or 1)))
        for number in filter(self.samples, self.held if has_labels else ()):
            labels = self._host_labels(number)
            found = loss.counts(labels, self.dtype)
            taken = len(labels) if several else self._taken(number, labels)
            self._counts[number] = found[0]
            totals[number // self.parts] += [taken, *found]
        total(totals)
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
        what counts in them where :meth:`count_labels` has found it.
        """
        reduction, labels = reduction_of(self.judge), self.labels(micro_batch)
        batch = micro_batch // self.parts
        whole = len(self.batches[batch]) * self.labels_of_sample(micro_batch) * self._shares[batch]
        divisor = (1 if reduction == "sum" else whole) * self._copies / self.scale
        scaled, gradient, *counted = self.judge(outputs, labels, divisor)
        if reduction == "count":
            taken = self._counts.get(micro_batch, self._taken(micro_batch, labels))
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
        """Terms of the loss that layers add: means over samples, or their sums."""
        is_sum = reduction_of(self.judge) == "sum"
        samples = 1 if is_sum else len(self.batches[micro_batch // self.parts])
        return Terms(1 / samples, self.scale)

    def indices(self, micro_batch: int) -> Array:
        """Indices of a micro-batch's samples in the data set."""
        return part(self.batches, self.parts, micro_batch)

    def unfit(self, batch: int = 0, *, nothing_counts: bool = False) -> str:
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
        return "nothing counts in the labels of its batch" if nothing_counts else ""

    def _host_inputs(self, micro_batch: int) -> Array:
        inputs = self.held[micro_batch].inputs
        if self.cut is not None:
            inputs = inputs[:, self.cut.own]
        return inputs if self.dtype is None else as_inputs(inputs, self.dtype, self.choices)

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
