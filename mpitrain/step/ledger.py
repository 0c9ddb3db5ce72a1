"""Ledger of steps on which the ranks agree later, with one message for several steps."""

from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.step.agreement import Agreed, NonFinite, Told, named, nonfinite


@dataclass(frozen=True)
class Noted:
    """A step as one rank knows it.

    Attributes:
        step: number of the step, counted from 1.
        epoch, samples, lr: as in :class:`~mpitrain.metrics.Step`.
        told: report of the rank.
        squares: this rank's part of the sum of the workers' squared gradient norms.
        failed: text that names tensors of this worker that were not finite; the weights stayed the
            same.  Empty: the step went well.
        unfit: text that names samples that were not finite, if the step has failed.
    """

    step: int
    epoch: int
    samples: int
    lr: float
    told: Told
    squares: float
    failed: str = ""
    unfit: str = ""


class Ledger:
    """Keeps the reports of steps until all ranks agree on them.

    Attributes:
        every: steps from one agreement to the next.
        noted: steps that the ranks have not agreed on.
    """

    def __init__(self, comm: Communicator, workers: int, every: int) -> None:
        """``comm``: all ranks; ``workers``: number of workers; ``every``: steps to an agreement."""
        self._comm, self._workers = comm, workers
        self.every = every
        self.noted: list[Noted] = []

    def agree(self) -> list[tuple[Noted, Agreed]]:
        """The steps since the last call, with reports summed over the ranks; one message.

        Raises:
            NonFinite: on all ranks: a loss or gradient was not finite.
        """
        noted, self.noted = self.noted, []
        if not noted:
            return []
        rows = np.array(
            [
                [*one.told.numbers, *one.told.strayed, one.squares, bool(one.failed)]
                for one in noted
            ],
            float,
        )
        self._comm.Allreduce(MPI.IN_PLACE, rows, op=MPI.SUM, algorithm="native")
        for one, failed in zip(noted, rows[:, -1], strict=True):
            if failed:
                raise self._why(one)
        found = []
        for one, (*told, strayed, anchor, squares, _) in zip(noted, rows.tolist(), strict=True):
            norm = float(np.sqrt(squares / self._workers))
            drift = float(np.sqrt(strayed / anchor)) if anchor else None
            found.append((one, Agreed.of(told, norm, norm, drift)))
        return found

    def _why(self, one: Noted) -> NonFinite:
        culprits, data = (named(self._comm, own) for own in (one.failed, one.unfit))
        return NonFinite(nonfinite(one.step, culprits, data))
