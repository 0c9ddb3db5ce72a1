"""A client's own training: steps on its own samples, from the server's weights."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, cast

import numpy as np
from mpi4py import MPI
from msgspec.structs import replace

from collectives import Communicator
from mpitrain.arrays import Array, Scalar
from mpitrain.config import Checkpoint, Config, Evaluate, Parallel
from mpitrain.config.federated import Federated
from mpitrain.data import DataError, Dataset, Sampler
from mpitrain.metrics import Skipped, Step
from mpitrain.optim.lr import learning_rate
from mpitrain.parallel.replicated import Replicated
from mpitrain.step.agreement import NonFinite
from mpitrain.training.trainer import Trainer


@dataclass(frozen=True)
class Trained:
    """What a client comes back with.

    Attributes:
        weights: flat, of shape (elements,).
        loss: sum of its steps' losses times their samples.
        samples: that it was trained on, each as often as it was seen.
    """

    weights: Array
    loss: float
    samples: int


class LocalTrainer(Trainer):
    """Trains one client after the other, each as a :class:`~mpitrain.training.trainer.Trainer`
    trains a job in one process: the steps are the same to the last bit."""

    def __init__(self, job: Config, data: Dataset, **own: Any) -> None:
        """Make it for a federated job.

        Args:
            job: with its table [federated].
            data: the data set, all of it.
            own: layers and loss of one's own, as of the trainer.
        """
        self._job = job
        self._number = 0
        self._start: Array | None = None
        optim = replace(
            job.optim,
            schedule="constant",
            warmup_epochs=0.0,
            decay_epochs=0.0,
            milestones=(),
            average=0.0,
        )
        alone = replace(
            job,
            run=replace(job.run, tensorboard=False, trace=False, check_every=0),
            optim=optim,
            parallel=Parallel(recompute=job.parallel.recompute),
            evaluate=Evaluate(),
            checkpoint=Checkpoint(),
            federated=Federated(),
        )
        # The optimiser's average and the tests are the server's.
        super().__init__(Communicator(MPI.COMM_SELF), alone, data=data, metrics={}, **own)

    def improve(
        self, start: Array, number: int, client: int, samples: Array, steps: int
    ) -> Trained:
        """Train a client from ``start`` on.

        Args:
            start: the server's weights, flat.
            number: of the round, counted from 0.
            client: its number.
            samples: those that it has, as indices.
            steps: that it takes.

        Raises:
            NonFinite, DataError: as :meth:`Trainer.step`; the message names the client.
        """
        self._number, self._start = number, start
        store = cast(Replicated, self.store)
        store.parameters[...] = start
        self.refresh()
        for state in self.updater.state:
            for values in state.values():
                values[...] = 0
        self.updater.steps = 0
        self.updater.left_out.clear()
        train = self.config.train
        # Client 0 has the order of a job without clients: one client is that job.
        own = (client, 0) if client else ()
        sampler = Sampler(len(samples), train.batch_size, self.config.run.seed, stream=own)
        first = number * train.epochs
        self.steps_done = first * sampler.steps_per_epoch
        epochs = range(first, first + train.epochs)
        batches = chain.from_iterable(
            ((epoch, samples[batch]) for batch in sampler.batches(epoch)) for epoch in epochs
        )
        loss, seen = 0.0, 0
        try:
            for epoch, batch in islice(batches, steps):
                record = self.step(epoch, batch)
                if isinstance(record, Step):
                    loss += record.loss * record.samples
                    seen += record.samples
        except (NonFinite, DataError) as error:
            raise type(error)(f"client {client} in round {number + 1}: {error}") from error
        weights = store.parameters.copy()
        if not np.isfinite(weights).all():
            raise NonFinite(
                f"client {client} in round {number + 1}: its weights are not finite after its "
                "steps; a smaller optim.lr or optim.clip_norm may help"
            )
        return Trained(weights, loss, seen)

    def rate(self, number: int) -> float:
        """The learning rate in a round, counted from 0, and in all of its steps: schedules count
        rounds."""
        train = replace(self.config.train, epochs=self._job.federated.rounds)
        return learning_rate(self._job.optim, train, number, 1)

    def _rate(self, steps_done: int) -> float:
        return self.rate(self._number)

    @np.errstate(over="ignore", invalid="ignore")
    def _update(
        self,
        epoch: int,
        samples: int,
        loss: Scalar,
        comm_seconds: float,
        unfit: Callable[[], str],
    ) -> Step | Skipped | None:
        """With the gradient of FedProx: mu times what the weights have moved by, which is that of
        ``mu / 2`` times the *square* of the distance."""
        mu = self._job.federated.prox
        if mu and self._start is not None:
            for piece in self.store.pieces:
                start = self._start[piece.start : piece.stop]
                piece.gradients[...] += mu * (piece.parameters - start)
        return super()._update(epoch, samples, loss, comm_seconds, unfit)

    def close(self) -> None:
        """Free what was bound to this rank's own communicator, and that one."""
        super().close()
        self.comm.close()
