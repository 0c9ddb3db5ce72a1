"""Reports of single ranks on a step, and their sums over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite, isnan, nan
from typing import Self

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.metrics.records import Step


class Diverged(ArithmeticError):
    """Training cannot go on from this loss or gradient.

    Attributes:
        before: records of the steps before that all ranks know only now.
        step: number of the last step whose batch had a part in it, counted from 1; 0: not known.
    """

    def __init__(self, text: str, before: Sequence[Step] = (), step: int = 0) -> None:
        super().__init__(text)
        self.before, self.step = before, step


class NonFinite(Diverged):
    """A loss or gradient is infinite or not a number; the message names its ranks and tensors."""


def nonfinite_message(step: int, culprits: str, data: str, also: str = "optim.clip_norm") -> str:
    """The error message for a step, counted from 1, that was not finite.

    ``culprits``: ranks and tensors; ``data``: samples that are not finite, as known on all ranks;
    ``also``: another remedy besides the learning rate.  Each may be empty.
    """
    said = data or culprits
    where = f"the loss or a gradient is not finite at step {step}{said and f' ({said})'}"
    if data:
        return (
            f"{where}; put these data right or leave them out, as no optim.lr helps where the loss "
            "reads them"
        )
    *most, last = filter(None, ("a smaller optim.lr", "a longer optim.warmup_epochs", also))
    return f"{where}; {', '.join(most)} or {last} may help"


def named(comm: MPI.Intracomm, own: str) -> str:
    """Texts of the first four ranks whose text is not empty, with their numbers; collective."""
    every = enumerate(comm.allgather(own))
    return "; ".join([f"rank {rank}: {text}" for rank, text in every if text][:4])


def mean_correction(labels: float, counted: float) -> float:
    """Factor on sums that were divided by ``labels``, which divides them by what counts instead.

    NaN if nothing counts, as torch's mean over nothing.
    """
    if labels == counted:
        return 1.0
    return labels / counted if counted > 0 else nan


@dataclass(frozen=True)
class StepReport:
    """Report of a rank on a step.

    Attributes:
        loss: this rank's part of the mean over the global batch.
        seconds: seconds of the step.
        comm_seconds: seconds in the sum of gradients.
        wait_seconds: seconds of waiting for other ranks.
        read_seconds: seconds of reading samples, or waiting for processes that read ahead.
        stopping: 1 if this rank was asked to stop.
        sent_bytes, shared_bytes: bytes sent in messages, and bytes moved in shared memory.
        faults: 1 if one of its layers is not a pure function.
        labels, counted: what this rank's sums are divided by, and what counts in its labels, where
            the loss is a mean over what counts; else 0.
        memory: most bytes that it has had so far.
        noise_squares: the squares of :class:`~mpitrain.parallel.store.Store`.
        squares: this rank's part of the squared norm of the gradient.
    """

    loss: float = 0.0
    seconds: float = 0.0
    comm_seconds: float = 0.0
    wait_seconds: float = 0.0
    read_seconds: float = 0.0
    stopping: float = 0.0
    sent_bytes: float = 0
    shared_bytes: float = 0
    faults: float = 0.0
    labels: float = 0
    counted: float = 0.0
    memory: float = 0
    noise_squares: float = 0.0
    squares: float = 0.0

    @property
    def numbers(self) -> list[float]:
        """All numbers, in order, to be summed over the ranks."""
        return [getattr(self, one.name) for one in fields(StepReport)]

    def plus(self, more: "StepReport") -> Self:
        """This report with the numbers of another one added."""
        names = [one.name for one in fields(StepReport)]
        return replace(self, **{name: getattr(self, name) + getattr(more, name) for name in names})

    def summed(self, comm: Communicator) -> "StepReport":
        """The sum of the ranks' reports; collective."""
        values = np.array(self.numbers)
        comm.Allreduce(MPI.IN_PLACE, values, algorithm="native")  # few numbers
        return StepReport(*values.tolist())


@dataclass(frozen=True, kw_only=True)
class Agreed(StepReport):
    """Reports of all ranks on a step, summed; ``loss`` is the mean over the global batch.

    Attributes:
        grad_norm: Euclidean norm of the global gradient, before clipping; if workers have gradients
            of their own, the root of the mean square of their norms.
        worker_norm: norm of this worker's whole gradient; equals ``grad_norm`` if all have the
            same.  Both are times the loss scale.
        mean_factor: factor that makes this worker's gradient a mean over what counts, as passes
            may have divided by all labels; ``loss`` and both norms have it already.
        unused: names of the tensors that had no part in the loss on any rank.
        drift: distance of the workers' weights from the anchor at the last exchange, divided by the
            anchor's norm; None: the step before had no exchange.
    """

    grad_norm: float = 0.0
    worker_norm: float = 0.0
    mean_factor: float = 1.0
    unused: frozenset[str] = frozenset()
    drift: float | None = None

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return isfinite(self.loss) and isfinite(self.grad_norm)

    @property
    def nothing_counts(self) -> bool:
        """Whether nothing counts in the labels over which a mean was taken."""
        return isnan(self.mean_factor) or isnan(self.counted)
