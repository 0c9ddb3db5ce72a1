"""A client's own training: steps on its own samples, from the server's weights."""

from dataclasses import dataclass
from itertools import chain, islice
from typing import cast

import numpy as np
from mpi4py import MPI
from msgspec.structs import replace

from mpitrain.arrays import Array
from mpitrain.config import Checkpoint, ConfigError, Evaluate, Parallel
from mpitrain.config.federated import Federated
from mpitrain.data import DataError, Sampler
from mpitrain.metrics.records import Step
from mpitrain.optim.lr import Rates
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.training import build
from mpitrain.training.assemble import assemble
from mpitrain.training.loop import Batch
from mpitrain.training.parts import Parts, UserObjects
from mpitrain.training.step import SynchronousLoop
from mpitrain.update.agreement import NonFinite


@dataclass(frozen=True)
class Trained:
    """Final flat weights of a client, the sum of its steps' losses times their samples, and the
    number of these samples, repeats included.
    """

    weights: Array
    loss: float
    samples: int


class RoundRates(Rates):
    """Schedules count rounds: all steps of one have the same rate."""

    def __init__(self, whole: Rates) -> None:
        """``whole``: the rates of the federated job, whose factor counts."""
        super().__init__(whole.optim, whole.train, 1)
        self.number, self._whole = 0, whole

    def rate(self, step: int) -> float:
        return self._whole.factor * super().rate(self.number)


class ClientLoop(SynchronousLoop):
    """Steps of a client, whose gradient has FedProx's term: mu times what the weights have moved by
    since ``start``, where the round began, as of ``mu / 2`` times the *square* of the distance.
    """

    def __init__(self, parts: Parts, rates: Rates, mu: float) -> None:
        super().__init__(parts)
        parts.rates, parts.counting = rates, build.counting(parts, is_changed=True)
        self.mu = mu
        self.start: Array = np.empty(0)

    def adjust_gradient(self) -> float:
        for piece in self.parts.store.pieces if self.mu else ():
            start = self.start[piece.start : piece.stop]
            piece.gradients[...] += self.mu * (piece.parameters - start)
        return 0.0


class Client:
    """Trains one client after the other on this rank, each as a job in one process: the steps are
    the same to the last bit.
    """

    def __init__(self, whole: Parts) -> None:
        job = whole.config
        alone = replace(
            job,
            run=replace(job.run, trace=False, check_every=0),
            optim=job.optim.constant,
            parallel=Parallel(recompute=job.parallel.recompute),
            evaluate=Evaluate(),
            checkpoint=Checkpoint(),
            federated=Federated(),
        )
        self._rates = RoundRates(whole.rates)

        # The optimiser's average and the tests are the server's.
        objects = UserObjects(whole.data, whole.objects.layers, whole.objects.loss, metrics={})
        parts = assemble(MPI.COMM_SELF, alone, objects, span=whole.span)
        self.loop = ClientLoop(parts, self._rates, job.federated.prox)

    def close(self) -> None:
        self.loop.close()

    def improve(
        self, start: Array, number: int, client: int, samples: Array, steps: int
    ) -> Trained:
        """Train a client on its samples, ``steps`` steps from the flat weights ``start`` on.

        Rounds are counted from 0, and ``samples`` are indices.

        Raises:
            NonFinite, DataError, ConfigError: as :meth:`Loop.step`; naming the client.
        """
        parts = self.loop.parts
        self._rates.number, self.loop.start = number, start
        store = cast(Replicated, parts.store)
        store.parameters[...] = start
        parts.refresh()
        for state in parts.updater.state:
            for values in state.values():
                values[...] = 0
        parts.updater.steps = 0
        parts.updater.left_out.clear()
        train = parts.config.train
        # Client 0 has the order of a job without clients: one client is that job.
        own = (client, 0) if client else ()
        sampler = Sampler(len(samples), train.batch_size, parts.config.run.seed, stream=own)
        first = number * train.epochs
        parts.steps_done = first * sampler.steps_per_epoch
        epochs = range(first, first + train.epochs)
        batches = chain.from_iterable(
            ((epoch, samples[batch]) for batch in sampler.batches(epoch)) for epoch in epochs
        )
        loss, seen = 0.0, 0
        try:
            for epoch, batch in islice(batches, steps):
                for record in self.loop.step(Batch(epoch, [batch])):
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
