"""Messages of a quorum: a gradient or a mean, and the report of its step."""

from collections.abc import Sequence

import numpy as np

from mpitrain.arrays import Array
from mpitrain.step.agreement import StepReport

#: Numbers in the header: the step, the number of gradients in a mean, and a report.
_HEADER = 2 + len(StepReport(0.0).numbers)
#: Largest number of steps of one worker whose gradients a mean may hold.
_MOST = 8


class Message:
    """A gradient or a mean, with its report, as bytes.

    Attributes:
        data: bytes of the whole message.
        header: float64, shape (13,).
        mask: float64, shape (workers, 8): steps of each worker in a mean, padded with 0.
        used: float64, shape (tensors,): 1 for each tensor that had a part in the loss.
        body: the gradient or mean, shape (elements,).
        worker: number of the worker that sends this gradient.
    """

    def __init__(self, workers: int, tensors: int, like: Array, worker: int) -> None:
        """Allocate the message; its body has the size and type of ``like``."""
        self.worker = worker
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

    def write(self, step: int, gradients: Array, own: StepReport, used: Sequence[bool]) -> None:
        """Fill in one worker's gradient of a step, its report, and the tensors that were used."""
        self.used[...] = used
        self.header[:] = [step, 1, *own.numbers]
        self.mask[0, 0] = step + 1
        self.body[...] = gradients


def mean(taken: Sequence[Message], step: int, result: Message) -> None:
    """Write the mean of the gradients ``taken``, times the number of workers, into ``result``.

    The factor gives it the size of a sum over all workers.  The sum is in order of ranks, as at a
    parameter server.
    """
    ordered = sorted(taken, key=lambda one: (one.worker, one.step))
    result.mask[...] = 0
    result.header[...] = 0
    result.used[...] = 0
    for number, one in enumerate(ordered):
        if number:
            result.body += one.body
        else:
            result.body[...] = one.body
        result.header += one.header
        np.maximum(result.used, one.used, out=result.used)
        row = result.mask[one.worker]
        row[np.count_nonzero(row)] = one.step + 1
    count, workers = result.header[1], len(result.mask)
    if count != workers:
        result.body *= workers / count
        result.header[2:] *= workers / count
    result.header[0] = step
