"""Data-parallel training, readable from top to bottom."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from types import TracebackType
from typing import Self

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain import data, models
from mpitrain.arena import Arena
from mpitrain.config import Config, ConfigError
from mpitrain.lr import learning_rate
from mpitrain.metrics import Epoch, Start, Step, Summary, Write, recorder
from mpitrain.nn import Array, softmax_cross_entropy
from mpitrain.optim import SGD
from mpitrain.parallel.data import GradientReducer
from mpitrain.parallel.replicas import check_replicas


class NonFiniteLoss(ArithmeticError):
    """The loss is infinite or not a number."""


class Trainer:
    """Trains a job's model on the ranks of ``comm``, each with its share of every batch.

    Any number of ranks computes the same global mean loss and gradient, up to rounding; replicas
    stay the same bit by bit, which is checked before the first step and after every epoch.

    Use it in a ``with`` statement, or call :meth:`close`.  All methods are collective.

    Attributes:
        comm: the ranks.
        config: the job.
        data: what is trained and tested on; all of it on each rank.
        sampler: the order of samples.
        model: a chain of layers.
        arena: its parameters and gradients.
        optimizer, optimizer_state: how parameters follow gradients.
        reducer: how gradients are summed over ranks.
        steps_done: steps since the beginning.
    """

    def __init__(self, comm: Communicator, config: Config) -> None:
        """Load the data, initialise the parameters from the seed, bind the communication.

        Raises:
            ConfigError: a value of the job does not fit the data.
            collectives.UnknownAlgorithm: an option of the all-reduce does not fit the ranks.
        """
        self.comm = comm
        self.config = config
        self.data = data.load(config.data, config.run.dtype)
        samples = len(self.data.train)
        if config.train.batch_size > samples:
            raise ConfigError(
                f"train.batch_size = {config.train.batch_size} must be at most {samples}, the "
                "number of training samples"
            )
        self.sampler = data.Sampler(samples, config.train.batch_size, config.run.seed)
        self.model = models.build(config.model, self.data.input_shape, self.data.classes)
        rng = np.random.default_rng(config.run.seed)
        self.arena = Arena(self.model.parameters(rng, np, config.run.dtype), comm.empty)
        self.optimizer = SGD(
            config.optim.momentum, config.optim.weight_decay, config.optim.nesterov
        )
        self.optimizer_state = self.optimizer.init(self.arena.parameters)
        self.reducer = GradientReducer(
            comm,
            self.arena,
            algorithm=config.parallel.algorithm,
            bucket_bytes=config.parallel.bucket_bytes,
            overlap=config.parallel.overlap,
        )
        self.steps_done = 0
        self._lap = perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Freeing is collective, and after an error the other ranks may be elsewhere.
        if error is None:
            self.close()

    def train(self) -> Summary:
        """Run all epochs; rank 0 reports to the console and to ``metrics.jsonl``.

        Raises:
            NonFiniteLoss: on all ranks; the parameters are those before that step.
            mpitrain.parallel.replicas.ReplicaMismatch: on all ranks.
            OSError: on rank 0, when it cannot write its report.
        """
        epochs = self.config.train.epochs
        seconds = comm_seconds = samples = 0.0
        with self._recorder(epochs * self.sampler.steps_per_epoch) as write:
            write(self._start())
            check_replicas(self.comm, self.arena.parameters, "before the first step")
            for epoch in range(epochs):
                for record in self.run_epoch(epoch):
                    write(record)
                    samples += record.samples
                    seconds += record.seconds
                    comm_seconds += record.seconds * record.comm_share
                accuracy = self.evaluate()
                write(Epoch(epoch, accuracy))
            summary = Summary(
                test_accuracy=accuracy,
                ranks=self.comm.size,
                algorithm=self.reducer.algorithm,
                reason=self.reducer.reason,
                samples_per_s=samples / seconds,
                comm_share=comm_seconds / seconds,
            )
            write(summary)
        return summary

    def run_epoch(self, epoch: int) -> Iterator[Step]:
        """One pass over the training samples, then the check of the replicas."""
        self._lap = perf_counter()
        for batch in self.sampler.batches(epoch):
            yield self.step(epoch, batch)
        check_replicas(self.comm, self.arena.parameters, f"after epoch {epoch}")

    # Overflow ends in a loss that is not finite, which all ranks report together.
    @np.errstate(over="ignore", invalid="ignore")
    def step(self, epoch: int, batch: Array) -> Step:
        """Train on the samples ``batch`` (indices; the same on all ranks): one update.

        Raises:
            NonFiniteLoss: on all ranks; the parameters are those before this step.
        """
        parameters = self.arena.parameter_views
        own = self.data.train[batch[data.share(len(batch), self.comm.rank, self.comm.size)]]

        logits, saved = self.model.forward(parameters, own.inputs)
        local_loss, dlogits = softmax_cross_entropy(logits, own.labels, divisor=len(batch))
        for layer, gradients in self.model.backward(parameters, saved, dlogits):
            self.arena.store(layer, gradients)
            self.reducer.ready(layer)
            self.reducer.progress()
        comm_seconds = self.reducer.wait()

        loss, seconds, comm_share = self._agree(local_loss, comm_seconds)
        epochs_done = self.steps_done / self.sampler.steps_per_epoch
        lr = learning_rate(self.config.optim, self.config.train, epochs_done)
        self.steps_done += 1
        change, self.optimizer_state = self.optimizer.update(
            self.arena.gradients, self.optimizer_state, self.arena.parameters, lr
        )
        self.arena.parameters += change
        return Step(
            step=self.steps_done,
            epoch=epoch,
            samples=len(batch),
            loss=loss,
            grad_norm=float(np.linalg.norm(self.arena.gradients)),
            lr=lr,
            seconds=seconds,
            samples_per_s=len(batch) / seconds,
            comm_share=comm_share,
        )

    def evaluate(self) -> float:
        """Part of the test samples whose label has the largest score."""
        own = self.data.test[data.share(len(self.data.test), self.comm.rank, self.comm.size)]
        right = 0
        for start in range(0, len(own), self.config.train.batch_size):
            some = own[start : start + self.config.train.batch_size]
            scores, _ = self.model.forward(self.arena.parameter_views, some.inputs)
            right += int((scores.argmax(axis=1) == some.labels).sum())
        all_right: int = self.comm.allreduce(right)
        return all_right / len(self.data.test)

    def close(self) -> None:
        """Free what was bound to the communicator."""
        self.reducer.close()

    def _agree(self, local_loss: float, comm_seconds: float) -> tuple[float, float, float]:
        """Global loss, mean seconds since the step before, and communication's share of them."""
        now = perf_counter()
        values = np.array([local_loss, now - self._lap, comm_seconds])
        self._lap = now
        self.comm.Allreduce(MPI.IN_PLACE, values, op=MPI.SUM, algorithm="native")
        loss, seconds, comm_seconds = values.tolist()
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"the loss is {loss} at step {self.steps_done + 1}; a smaller optim.lr or a longer "
                "optim.warmup_epochs may help"
            )
        return loss, seconds / self.comm.size, comm_seconds / seconds

    def _start(self) -> Start:
        return Start(
            ranks=self.comm.size,
            algorithm=self.reducer.algorithm,
            reason=self.reducer.reason,
            parameters=self.arena.parameters.size,
            config=self.config,
        )

    def _recorder(self, steps: int) -> AbstractContextManager[Write]:
        if self.comm.rank == 0:
            return recorder(self.config, steps)
        return nullcontext(lambda record: None)
