"""Ledger of steps on which the ranks agree later, with one message for several steps."""

from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.step.agreement import Agreed, NonFinite, StepReport, named, nonfinite


@dataclass(frozen=True)
class LocalStep:
    """A step as one rank knows it.

    Attributes:
        step: number of the step, counted from 1.
        epoch, samples, lr: as in :class:`~mpitrain.metrics.records.Step`.
        report: report of the rank, whose loss is a mean over what counts already.
        squares: this rank's part of the sum of the workers' squared gradient norms.
        failed: text that names tensors of this worker that were not finite; the weights stayed the
            same.  Empty: the step went well.
        unfit: text that names samples that were not finite, if the step has failed.
    """

    step: int
    epoch: int
    samples: int
    lr: float
    report: StepReport = field(default_factory=lambda: StepReport(0.0))
    squares: float = 0.0
    failed: str = ""
    unfit: str = ""


class Ledger:
    """Keeps the reports of steps until all ranks agree on them.

    Attributes:
        every: steps from one agreement to the next.
        steps: steps that the ranks have not agreed on.
    """

    def __init__(self, comm: Communicator, workers: int, every: int) -> None:
        """``comm``: all ranks; ``workers``: number of workers; ``every``: steps to an agreement."""
        self._comm, self._workers = comm, workers
        self.every = every
        self.steps: list[LocalStep] = []

    def agree(self) -> list[tuple[LocalStep, Agreed]]:
        """The steps since the last call, with reports summed over the ranks; one message.

        Raises:
            NonFinite: on all ranks: a loss or gradient was not finite.
        """
        steps, self.steps = self.steps, []
        if not steps:
            return []
        own = [
            [*one.report.numbers, *one.report.strayed, one.squares, bool(one.failed)]
            for one in steps
        ]
        rows = np.array(own, float)
        self._comm.Allreduce(MPI.IN_PLACE, rows, op=MPI.SUM, algorithm="native")
        found = []
        for one, row in zip(steps, rows.tolist(), strict=True):
            *numbers, strayed, anchor, squares, failed = row
            if failed:
                culprits, data = (named(self._comm, text) for text in (one.failed, one.unfit))
                raise NonFinite(nonfinite(one.step, culprits, data))
            norm = float(np.sqrt(squares / self._workers))
            drift = float(np.sqrt(strayed / anchor)) if anchor else None
            found.append((one, Agreed(*numbers, grad_norm=norm, own_norm=norm, drift=drift)))
        return found
