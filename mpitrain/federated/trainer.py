"""Rounds of a federated job: clients are asked, train, and their mean change moves the server."""

from collections.abc import Iterator, Mapping
from math import sqrt
from time import perf_counter
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from collectives import CorruptMessage
from mpitrain import fit
from mpitrain.arrays import Array
from mpitrain.config import Config, ConfigError, expect
from mpitrain.data import DataError, Sampler
from mpitrain.data.stream import Streamed
from mpitrain.federated import keys
from mpitrain.federated.choice import Choice, Cohort
from mpitrain.federated.client import LocalTrainer, Trained
from mpitrain.federated.errors import RoundError
from mpitrain.federated.server import Server
from mpitrain.federated.split import split
from mpitrain.federated.sums import Wire, sums
from mpitrain.metrics import Round, Skipped, Step
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.ranks.together import together
from mpitrain.step.agreement import NonFinite

#: Samples whose labels are read at a time.
_AT_A_TIME = 4096


class Trainer(fit.Trainer):
    """The server and all clients of a job with a table [federated].

    Client k is simulated on rank ``k mod ranks``; whatever the number of ranks, the weights are the
    same bit by bit.  What :class:`mpitrain.Trainer` calls a step is a round here: the pseudo
    gradient of it is the mean change of the clients (Reddi et al. 2021).

    Attributes:
        clients: the samples of each client, as indices.
        choice: who takes part in each round.
    """

    federates = True
    shared_errors = (*fit.Trainer.shared_errors, RoundError)

    def __init__(
        self, comm: MPI.Intracomm | None = None, config: Config | None = None, **given: Any
    ) -> None:
        """As :class:`mpitrain.Trainer`.

        Raises:
            ConfigError: besides what that one says: no clients, more clients than samples, an
                optimiser or a schedule of one's own, a model with running means.
        """
        for key in ("optimizer", "schedule"):
            if given.get(key) is not None and not isinstance(given[key], str):
                raise ConfigError(
                    f"federated: {key}= has no part in clients and server; set the keys of [optim] "
                    "and federated.server"
                )
        super().__init__(comm, config, **given)
        with self._closed_if_refused():
            self._choose_clients()

    def _choose_clients(self) -> None:
        """Split the samples among clients, and make what trains them and moves the server."""
        own, run = self.config.federated, self.config.run
        if not own.clients:
            raise ConfigError("federated.clients = 0; set it, or take mpitrain.Trainer")
        if own.secure:
            together(self.comm, keys.check, ConfigError)
        if isinstance(self.data.train, Streamed):
            raise ConfigError(
                "federated: the training data are read in turn, and clients have samples here and "
                "there among them; give data that are read by number"
            )
        if self.state:
            expect(self.config, "batch-norm")
        labels = together(self.comm, self._labels, DataError)
        samples = len(self.data.train)
        self.clients = split(own, run.seed, samples, labels)
        sizes = np.array([len(part) for part in self.clients])
        train = self.config.train
        work = train.epochs * -(-sizes // train.batch_size)
        self.choice = Choice(own, run.seed, sizes, work)
        most = self.choice.most_weight()
        self._wire = Wire(self.comm, self.config.parallel.algorithm)
        self._sums = sums(self._wire, own, run.seed, most)
        if self.comm.size > 1:
            self.store.algorithm, self.store.reason = self._wire.algorithm, "of whole numbers"
        self._local = LocalTrainer(self.config, self.data, layers=self._layers, loss=self._loss)
        self._opened.callback(self._local.close)
        # [optim] is the clients'.
        self.server = Server(
            self.grid, cast(Replicated, self.store), own, self.config.optim.average
        )
        self.updater = self.server
        # A round is a pass of one step.
        self.sampler = Sampler(samples, samples, run.seed)

    @property
    def total_steps(self) -> int:
        """Rounds of the whole run."""
        return self.config.federated.rounds

    def _labels(self) -> Array | None:
        """The classes of the training samples, if the split goes by them and they have any."""
        data = self.data
        if self.config.federated.split == "iid" or not data.classes or data.label_shape:
            return None
        count = len(data.train)
        parts = [data.train[i : i + _AT_A_TIME].labels for i in range(0, count, _AT_A_TIME)]
        return np.concatenate(parts)

    def run_epoch(self, epoch: int) -> Iterator[Step | Skipped | Round]:
        """The next round: how it went, and its step.

        Raises:
            RoundError: on all ranks; it has no result.
            NonFinite, DataError: on all ranks; a client cannot train, or the server's step ends in
                weights that are not finite.
            ReplicaMismatch: on all ranks; they have different weights.
            CorruptMessage: on one rank, where messages carry checksums.
        """
        if self._before_step:
            self._before_step(self)
        try:
            yield from self._round()
        except CorruptMessage as error:
            raise CorruptMessage(f"step {self.steps_done + 1}: {error}") from error
        self.check_replicas(f"after step {self.steps_done}")

    def _round(self) -> Iterator[Step | Round]:
        begun = perf_counter()
        cohort = self.choice.cohort(self.steps_done)
        if not cohort.parts:
            raise RoundError(
                f"round {cohort.number + 1}: none of {cohort.draws} clients has sent anything; "
                "make federated.deadline longer or dropout less"
            )
        store = cast(Replicated, self.store)
        with self.span("clients", "forward"):
            trained = together(
                self.comm, lambda: self._train(cohort), NonFinite, DataError, ConfigError
            )
        before, sent = self._wire.seconds, self._wire.sent
        ends = {client: one.weights for client, one in trained.items()}
        with self.span("sum", "communicate"), self.comm.waiting("the sum of the clients' changes"):
            mean = self._sums.mean(store.parameters, ends, cohort)
        summing = self._wire.seconds - before
        sent = self._wire.sent - sent + mean.key_bytes
        with self.span("update", "update"):
            # What is not finite is found in the result.
            with np.errstate(over="ignore", invalid="ignore"):
                self.server.move(mean.change)
            if not np.isfinite(store.parameters).all():  # of all ranks, or of none
                raise NonFinite(
                    f"round {cohort.number + 1}: the server's weights are not finite after its "
                    "step; a smaller federated.server_lr may help"
                )
            self.refresh()
        self.steps_done += 1
        self.stopping = self.comm.allreduce(self.stop.raised(), op=MPI.LOR)
        loss, seen = self._told(trained)
        done = perf_counter()
        self.account.busy.add(done - begun, summing, {})
        seconds = self.comm.allreduce(done - begun) / self.comm.size
        reducing = self.comm.allreduce(summing) / self.comm.size
        yield Round(
            step=self.steps_done,
            asked=cohort.draws,
            taken=cohort.taken,
            dropped=cohort.draws - cohort.taken,
            partial=sum(part.draws for part in cohort.parts if not part.whole),
            steps=sum(part.steps for part in cohort.parts),
            clock=cohort.seconds,
            client_bytes=mean.client_bytes,
            plain_bytes=store.parameters.nbytes,
            rank_bytes=self.comm.allreduce(sent, op=MPI.MAX),
            clipped=mean.clipped,
        )
        moved = [self.comm.allreduce(own) / self.comm.size for own in self.account.moved()]
        yield Step(
            step=self.steps_done,
            epoch=self.steps_done - 1,
            samples=seen,
            loss=loss,
            grad_norm=sqrt(float(mean.change[0] @ mean.change[0])),
            lr=self._local.round_rates.rate(0),
            seconds=seconds,
            samples_per_s=seen / seconds,
            comm_share=min(1.0, reducing / seconds),
            sent_bytes=moved[0],
            shared_bytes=moved[1],
        )

    def _train(self, cohort: Cohort) -> dict[int, Trained]:
        """The clients of this rank, one after the other."""
        start = cast(Replicated, self.store).parameters
        return {
            part.client: self._local.improve(
                start, cohort.number, part.client, self.clients[part.client], part.steps
            )
            for part in cohort.parts
            if part.client % self.comm.size == self.comm.rank
        }

    def _told(self, trained: Mapping[int, Trained]) -> tuple[float, int]:
        """The mean loss over all clients' steps, and their samples; added up in their order."""
        own = [(client, one.loss, one.samples) for client, one in trained.items()]
        every = sorted(told for some in self.comm.allgather(own) for told in some)
        seen = sum(samples for _, _, samples in every)
        return (sum(loss for _, loss, _ in every) / seen if seen else float("nan")), seen
