"""Rounds of a federated job: clients are asked, train, and their mean change moves the server."""

from collections.abc import Generator, Mapping
from functools import partial
from math import inf, isnan, sqrt
from typing import cast

import numpy as np
from mpi4py import MPI

from mpitrain.config import ConfigError, expect
from mpitrain.data import DataError
from mpitrain.federated import keys
from mpitrain.federated.choice import Choice, Cohort
from mpitrain.federated.client import Client, Trained
from mpitrain.federated.samples import of_clients
from mpitrain.federated.secure import RoundError
from mpitrain.federated.server import ServerOptimizer
from mpitrain.federated.sums import Mean, Wire, sums
from mpitrain.metrics.records import Record, Round, Step
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.ranks.together import together
from mpitrain.training.account import Begun
from mpitrain.training.loop import Batch, Loop
from mpitrain.training.parts import Parts
from mpitrain.update.agreement import Agreed, NonFinite

#: Sum of the losses, and samples, of each client of a round.
Losses = Mapping[int, tuple[float, int]]
#: Rounds in turn with a smaller loss after which FedProx's mu falls.
_FALLS = 5


class FederatedLoop(Loop):
    """The server and all clients of a job with a table [federated].

    Client k is simulated on rank ``k mod ranks``; whatever the number of ranks, the weights are the
    same bit by bit.  A step is a round: its pseudo-gradient is the mean change of the clients
    (Reddi et al. 2021).

    Attributes:
        clients: indices of the samples of each client.
        choice: draws the clients of each round.
    """

    def __init__(self, parts: Parts) -> None:
        """Split the samples among clients, and make what trains them; collective.

        Raises:
            ConfigError: on all ranks: more clients than samples, an optimiser or a schedule of the
                program's own, a model with running means.
        """
        super().__init__(parts)
        self.check_every = 1
        table, run = parts.config.federated, parts.config.run
        if table.secure:
            together(parts.comm, keys.check, ConfigError)
        for key in ("optimizer", "schedule"):
            if getattr(parts.objects, key) is not None:
                raise ConfigError(
                    f"federated: {key}= has no part in clients and server; set the keys of [optim] "
                    "and federated.server"
                )
        if parts.state or parts.model.mixes:
            expect(parts.config, "batch-norm")
        self.clients, self._names = of_clients(parts, table)
        if len(self.clients) != table.clients:
            raise ConfigError(
                f"federated.clients: own.clients names {len(self.clients)} clients, and the job "
                f"says {table.clients}; set it to {len(self.clients)}"
            )
        sizes = np.array([len(part) for part in self.clients])
        train = parts.config.train
        work = train.epochs * -(-sizes // train.batch_size)
        self.choice = Choice(table, run.seed, sizes, work)
        self._wire = Wire(parts.comm, parts.config.parallel.algorithm)
        self._sums = sums(self._wire, table, run.seed, self.choice.most_weight())
        self._store = cast(Replicated, parts.store)
        if parts.comm.size > 1:
            self._store.algorithm, self._store.reason = self._wire.algorithm, "of whole numbers"
        parts.prox = parts.prox or [table.prox, inf, 0]
        self._client = Client(parts)
        parts.opened.callback(self._client.close)
        self._server = cast(ServerOptimizer, parts.updater)

    def batches(self, epoch: int) -> Generator[Batch]:
        yield Batch(epoch, ())

    def step(self, batch: Batch) -> list[Record]:
        """Take a round.

        Returns:
            How the round went, and its step.

        Raises:
            RoundError: on all ranks; it has no result.
            NonFinite: on all ranks; a client cannot train, or the server's step ends in weights
                that are not finite.
            Exception: as :meth:`Loop.step`.
        """
        parts, wire = self.parts, self._wire
        parts.expect_open()
        parts.before_step(parts)
        nbytes = partial(self._sums.client_bytes, self._store.parameters)
        cohort = self.choice.cohort(parts.steps_done, nbytes)
        if not cohort.parts:
            raise RoundError(
                f"round {cohort.number + 1}: none of {cohort.draws} clients has sent anything; "
                "make federated.deadline longer or dropout less"
            )
        with parts.span("clients", "forward"):
            trained = parts.account.together(
                lambda: self._train(cohort), NonFinite, DataError, ConfigError
            )
        before, sent = wire.seconds, wire.sent
        ends = {client: one.weights for client, one in trained.items()}
        waiting = parts.comm.waiting("the sum of the clients' changes")
        with parts.span("sum", "communicate"), waiting:
            mean = self._sums.mean(self._store.parameters, ends, cohort)
        summing, sent = wire.seconds - before, wire.sent - sent + mean.key_bytes
        self._move(mean, cohort)
        parts.count_steps(parts.steps_done, [()])
        parts.stopping = parts.comm.allreduce(parts.stop.raised(), op=MPI.LOR)
        losses = self._losses(trained)
        step = self._step(losses, mean, summing)
        found = self._round(cohort, mean, sent, losses)
        self._adapt(step.loss)
        return [found, step]

    def _step(self, losses: Losses, mean: Mean, own: float) -> Step:
        """Record of the step; collective.  ``own``: this rank's seconds in the sum of changes."""
        parts, samples = self.parts, sum(samples for _, samples in losses.values())
        loss = sum(loss for loss, _ in losses.values()) / samples if samples else float("nan")
        lasted = parts.account.lap()
        times = [lasted, own, parts.account.add(lasted, own, {})]
        told = [*times, *parts.account.moved(), parts.device.memory()]
        seconds, comm_seconds, waited, sent, shared, memory = map(parts.comm.allreduce, told)
        norm = sqrt(float(mean.change[0] @ mean.change[0]))
        agreed = Agreed(
            loss, seconds, comm_seconds, waited, sent_bytes=sent, shared_bytes=shared,
            memory=memory, grad_norm=norm,
        )  # fmt: skip
        number = parts.steps_done - 1
        step = Begun(parts.steps_done, number, samples, parts.rates.rate(number))
        return parts.account.record(step, agreed)

    def _round(self, cohort: Cohort, mean: Mean, sent: int, losses: Losses) -> Round:
        """Record of the round; collective.  ``sent``: bytes from this rank for the mean."""
        return Round(
            step=self.parts.steps_done,
            asked=cohort.draws,
            taken=cohort.taken,
            dropped=cohort.draws - cohort.taken,
            partial=sum(part.draws for part in cohort.parts if not part.whole),
            steps=sum(part.steps for part in cohort.parts),
            clock=cohort.seconds,
            client_bytes=mean.client_bytes,
            plain_bytes=self._store.parameters.nbytes,
            rank_bytes=self.parts.comm.allreduce(sent, op=MPI.MAX),
            clipped=mean.clipped,
            losses={self._names[client]: loss / n for client, (loss, n) in losses.items() if n},
            prox=self.parts.prox[0],
        )

    def _adapt(self, loss: float) -> None:
        """Let FedProx's mu follow the mean loss of the clients, if it may."""
        by, (mu, last, falls) = self.parts.config.federated.prox_step, self.parts.prox
        if isnan(loss):  # all clients have skipped their steps
            return
        falls = falls + 1 if loss < last < inf else 0  # the first round follows none
        if by and loss > last:
            mu += by
        elif by and falls == _FALLS:
            mu, falls = max(0.0, mu - by), 0
        self.parts.prox[:] = mu, loss, falls

    def _move(self, mean: Mean, cohort: Cohort) -> None:
        """Take the server's step against the mean change."""
        with self.parts.span("update", "update"):
            # The check below finds overflows.
            with np.errstate(over="ignore", invalid="ignore"):
                self._server.move(mean.change)
            if not np.isfinite(self._store.parameters).all():  # alike on all ranks
                raise NonFinite(
                    f"round {cohort.number + 1}: the server's weights are not finite after its "
                    "step; a smaller federated.server_lr may help"
                )
            self.parts.refresh()

    def _train(self, cohort: Cohort) -> dict[int, Trained]:
        """Train this rank's clients, one after the other."""
        comm, start = self.parts.comm, self._store.parameters
        self._client.loop.mu = self.parts.prox[0]
        return {
            part.client: self._client.improve(
                start, cohort.number, part.client, self.clients[part.client], part.steps
            )
            for part in cohort.parts
            if part.client % comm.size == comm.rank
        }

    def _losses(self, trained: Mapping[int, Trained]) -> Losses:
        """The sum of the losses of each client's steps, and their samples; in order of clients."""
        own = [(client, (one.loss, one.samples)) for client, one in trained.items()]
        return dict(sorted(one for some in self.parts.comm.allgather(own) for one in some))
