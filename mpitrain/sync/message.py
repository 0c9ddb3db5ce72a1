"""Messages of a quorum: a gradient or a mean, and the report of its step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Array
from mpitrain.step.agreement import Told

#: Numbers before the gradients: the step, the gradients in a mean, and a report.
_HEADER = 11
#: Steps of one worker whose gradients a mean may have.
_MOST = 8


class Message:
    """A gradient or a mean, with its report, as bytes.

    Attributes:
        data: all of it.
        header: float64, shape (11,).
        mask: float64, shape (workers, 8): the steps of each worker in a mean, filled up with 0.
        used: float64, shape (tensors,): 1 where a gradient in it is of a tensor that had a part in
            the loss.
        body: shape (elements,).
    """

    def __init__(self, workers: int, tensors: int, like: Array) -> None:
        """Memory for as many tensors, and as many elements as ``like`` has."""
        several = _HEADER + workers * _MOST
        numbers = several + tensors
        self.data = np.zeros(8 * numbers + like.nbytes, np.uint8)
        front = self.data[: 8 * numbers].view(np.float64)
        self.header = front[:_HEADER]
        self.mask = front[_HEADER:several].reshape(workers, _MOST)
        self.used = front[several:]
        self.body: Array = self.data[8 * numbers :].view(like.dtype)

    @property
    def step(self) -> int:
        """Number of the step in the run, counted from 0."""
        return int(self.header[0])

    def write(self, step: int, gradients: Array, own: Told, used: Sequence[bool]) -> None:
        """One gradient of a step, what its worker tells, and which tensors it is of."""
        self.used[...] = used
        self.header[:] = [step, 1, *own.numbers]
        self.mask[0, 0] = step + 1
        self.body[...] = gradients


@dataclass(frozen=True)
class Late:
    """A gradient that has come and is in no mean yet."""

    worker: int
    message: Message


def mean(taken: Sequence[Late], step: int, result: Message, workers: int) -> None:
    """The mean of what was taken, times the number of workers, as their sum would be.

    Ranks follow one another in the sum, as at a parameter server.
    """
    ordered = sorted(taken, key=lambda one: (one.worker, one.message.step))
    result.mask[...] = 0
    result.header[...] = 0
    result.used[...] = 0
    for number, one in enumerate(ordered):
        if number:
            result.body += one.message.body
        else:
            result.body[...] = one.message.body
        result.header += one.message.header
        np.maximum(result.used, one.message.used, out=result.used)
        row = result.mask[one.worker]
        row[np.count_nonzero(row)] = one.message.step + 1
    count = result.header[1]
    if count != workers:
        result.body *= workers / count
        result.header[2:] *= workers / count
    result.header[0] = step
