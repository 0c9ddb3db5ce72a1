"""A client's own training: steps on its own samples, from the server's weights."""

from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, cast

import numpy as np
from mpi4py import MPI
from msgspec.structs import replace

from mpitrain.arrays import Array
from mpitrain.config import Checkpoint, Config, ConfigError, Evaluate, Parallel
from mpitrain.config.federated import Federated
from mpitrain.data import DataError, Dataset, Sampler
from mpitrain.metrics import Step
from mpitrain.optim.lr import Rates
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.parallel.store import Store
from mpitrain.step.agreement import Agreed, NonFinite, Told
from mpitrain.step.gradient import GlobalGradient
from mpitrain.sync import EveryStep, Strategy
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


class RoundRates(Rates):
    """Schedules count rounds: all steps of one have the same rate."""

    def __init__(self, job: Config) -> None:
        super().__init__(job.optim, replace(job.train, epochs=job.federated.rounds), 1)
        self.number = 0

    def rate(self, step: int) -> float:
        return super().rate(self.number)


class Proximal(EveryStep):
    """FedProx: a gradient has mu times what the weights have moved by since the round began, which
    is that of ``mu / 2`` times the *square* of the distance.

    Attributes:
        start: the weights as the round began, flat.
    """

    def __init__(self, store: Store, mu: float) -> None:
        self._store, self._mu = store, mu
        self.start: Array = np.empty(0)

    def agree(self, step: int, gradient: GlobalGradient, own: Told) -> Agreed:
        for piece in self._store.pieces if self._mu else ():
            start = self.start[piece.start : piece.stop]
            piece.gradients[...] += self._mu * (piece.parameters - start)
        return super().agree(step, gradient, own)


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
        super().__init__(MPI.COMM_SELF, alone, data=data, metrics={}, **own)
        self.rates = self.round_rates = RoundRates(job)

    def _strategy(self) -> Strategy:
        self._proximal = Proximal(self.store, self._job.federated.prox)
        return self._proximal

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
            NonFinite, DataError, ConfigError: as :meth:`Trainer.step`; naming the client.
        """
        self.round_rates.number, self._proximal.start = number, start
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
        except (NonFinite, DataError, ConfigError) as error:
            raise type(error)(f"client {client} in round {number + 1}: {error}") from error
        weights = store.parameters.copy()
        if not np.isfinite(weights).all():
            raise NonFinite(
                f"client {client} in round {number + 1}: its weights are not finite after its "
                "steps; a smaller optim.lr or optim.clip_norm may help"
            )
        return Trained(weights, loss, seen)
