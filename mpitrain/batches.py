"""The micro-batches of one or several steps, read by the stages that need them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.arrays import Array
from mpitrain.data.dataset import Indexed, Samples
from mpitrain.group import share
from mpitrain.objective import Loss


class MicroBatches:
    """Micro-batch m is part ``m % parts`` of batch ``m // parts``; parts differ by one sample.

    The batches are global: which rank takes which micro-batch has no part in what they hold.
    """

    def __init__(
        self,
        samples: Indexed,
        batches: Sequence[Array],
        parts: int,
        loss: Loss,
        *,
        labels_per_sample: int = 1,
        dtype: Any = None,
        scale: float = 1.0,
        xp: Any = np,
    ) -> None:
        """Describe them; nothing is read yet.

        Args:
            samples: where they come from.
            batches: sample indices of each batch.
            parts: micro-batches of each batch.
            loss: the loss, for the last stage.
            labels_per_sample: over which the loss is a mean, too.
            dtype: type of floating-point inputs.
            scale: factor on the loss before its gradient is taken.
            xp: NumPy or CuPy: where the arrays are made.
        """
        self._samples = samples
        self._batches = batches
        self._parts = parts
        self._loss = loss
        self._labels_per_sample = labels_per_sample
        self._dtype = dtype
        self._scale = scale
        self._xp = xp
        self._held: dict[int, Samples] = {}

    def samples(self, micro_batch: int) -> int:
        """How many it has."""
        return len(self.indices(micro_batch))

    def inputs(self, micro_batch: int) -> Array:
        """What the first stage reads."""
        inputs = self._read(micro_batch).inputs
        if self._dtype is not None and inputs.dtype.kind == "f":
            inputs = inputs.astype(self._dtype, copy=False)
        return inputs if self._xp is np else self._xp.asarray(inputs)

    def labels(self, micro_batch: int) -> Array:
        """What the last stage compares with."""
        labels = self._read(micro_batch).labels
        return labels if self._xp is np else self._xp.asarray(labels)

    def loss(self, micro_batch: int, outputs: Array) -> tuple[float, Array]:
        """Its part of the batch's mean loss, and the gradient of ``scale`` times that."""
        batch = self._batches[micro_batch // self._parts]
        divisor = len(batch) * self._labels_per_sample / self._scale
        scaled, gradient = self._loss(outputs, self.labels(micro_batch), divisor)
        return scaled / self._scale, gradient

    def indices(self, micro_batch: int) -> Array:
        """Numbers of its samples."""
        batch, part = divmod(micro_batch, self._parts)
        whole = self._batches[batch]
        return whole[share(len(whole), part, self._parts)]

    def read(self, micro_batches: Sequence[int]) -> None:
        """Reads these now, each once."""
        self._held = {m: self._samples[self.indices(m)] for m in micro_batches}

    def _read(self, micro_batch: int) -> Samples:
        if micro_batch not in self._held:  # for inputs and labels, where a rank needs both
            self._held = {micro_batch: self._samples[self.indices(micro_batch)]}
        return self._held[micro_batch]
