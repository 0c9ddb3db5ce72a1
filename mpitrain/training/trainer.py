"""A step of a job on any layout of ranks; :mod:`mpitrain.run` has the loop."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from math import nan
from time import perf_counter

import numpy as np

from collectives import CorruptMessage
from mpitrain.arrays import Array, Scalar
from mpitrain.metrics import Overlap, Round, Skipped, Step, Straggler, Times
from mpitrain.parallel.replicas import check_replicas
from mpitrain.pipeline.runtime import reads
from mpitrain.pipeline.stage import Latest
from mpitrain.step.agreement import Agreed, NonFinite, Told, named, nonfinite
from mpitrain.step.ledger import Noted
from mpitrain.sync import Progressing
from mpitrain.training.asynchronous import train_window
from mpitrain.training.feed import Held
from mpitrain.training.placed import Placed


class Trainer(Placed):
    """Trains a job's model on the ranks of ``comm``, in the layout that the job asks for.

    Every layout computes the same global mean loss and gradient as one process, up to rounding;
    what several ranks hold stays the same bit by bit, which :meth:`run_epoch` checks after every
    epoch, and :func:`mpitrain.train` before the first step, too.

    Attributes:
        records: of the steps that have become known with the last call of :meth:`step`.
    """

    records: Sequence[Step | Skipped] = ()

    def stop_reason(self) -> str:
        """Why a rank was asked to stop."""
        return next(filter(None, self.comm.allgather(self.stop.reason)), "no reason")

    def run_epoch(self, epoch: int) -> Iterator[Step | Skipped | Round]:
        """The steps of a pass over the training samples that are not done yet.

        Raises:
            DataError: on all ranks; one of them cannot read a sample.
            NonFinite: on all ranks; a loss or a gradient is not finite.
            ConfigError: on all ranks; a layer, a loss or a metric of the program's own is no
                function of its inputs.
            ReplicaMismatch: on all ranks; they hold different values.
            CorruptMessage: on one rank, naming the step, where messages carry checksums.
        """
        self.account.begin()
        first = self.steps_done - epoch * self.sampler.steps_per_epoch
        left = self.total_steps - self.steps_done
        batches = islice(self.sampler.batches(epoch), first, first + left)
        asynchronous = self.config.parallel.schedule == "asynchronous"
        with closing(self._read(epoch, batches)) as reading:
            for some, held in reading:
                if self._before_step:
                    self._before_step(self)
                try:
                    if asynchronous:
                        yield from train_window(self, epoch, some, held)
                    else:
                        self.step(epoch, some[0], held)
                        yield from self.records
                except CorruptMessage as error:
                    raise CorruptMessage(f"step {self.steps_done + 1}: {error}") from error
                if self.stopping:
                    return
                every = self.config.run.check_every
                if every and self.steps_done % every == 0:
                    self.check_replicas(f"after step {self.steps_done}")
        self.check_replicas(f"after epoch {epoch}")

    def _read(self, epoch: int, batches: Iterable[Array]) -> Generator[tuple[list[Array], Held]]:
        """The batches of each step or window, with what this rank reads of them."""
        asynchronous = self.config.parallel.schedule == "asynchronous"
        size = self.config.parallel.window if asynchronous else 1

        def own(steps: int) -> list[int]:
            pipeline, report = self.passes.schedule(steps if asynchronous else 1)
            return reads(pipeline, report, self.grid.place)

        return self.feed.batches("train", epoch, batches, size, self.passes.parts, own)

    @np.errstate(over="ignore", invalid="ignore")
    def step(self, epoch: int, batch: Array, held: Held | None = None) -> Step | Skipped | None:
        """Train on a batch: one update.

        Args:
            epoch: counted from 0.
            batch: sample indices, the same on all ranks.
            held: of its micro-batches those that this rank needs; by default they are read now.

        Returns:
            Its record; None if the ranks tell each other of it later, which is after
            ``sync.agree`` steps and at the end of an epoch: :attr:`records` has them all then.

        Raises:
            DataError: on all ranks; one of them cannot read a sample.
            NonFinite: on all ranks; the parameters are those before this step.  Where the ranks
                tell each other later, each worker has left out the steps that were not finite.
            ConfigError: on all ranks, when they tell each other; a layer, a loss or a metric of
                the program's own is no function of its inputs.
            RuntimeError: the trainer is closed.
        """
        self.expect_open()
        self.records = ()
        self.records = self._known(self._step(epoch, batch, held))
        return self.records[-1] if self.records else None

    def _step(self, epoch: int, batch: Array, held: Held | None) -> Step | Skipped | None:
        """The same; None if the ranks tell each other later."""

        step = self.steps_done
        self._state_before = {name: values.copy() for name, values in self.state.items()}
        if not self.strategy.computes(step):
            return self._update(epoch, len(batch), 0.0, 0.0, lambda: "")
        self.store.reset()
        self.summation.begin(step, self.scale.value, self.rates.common(step))
        if held is None:
            ((_, held),) = self._read(epoch, [batch])
        source = self.passes.source(held, [batch], self.scale.value * self._workers)

        def update(number: int, loss: Scalar) -> Step | Skipped | None:
            with self.span("reduce", "communicate"), self.comm.waiting("the sum of gradients"):
                comm_seconds = self.store.wait()
            return self._update(epoch, len(batch), loss, comm_seconds, source.unfit)

        (record,) = self.passes.runner().run(
            source,
            Latest(self.passes.weights),
            Progressing(self.store, self.strategy),
            update,
            lambda micro_batch: self.passes.context(step, source.indices(micro_batch)),
        )
        return record

    def _known(self, record: Step | Skipped | None) -> list[Step | Skipped]:
        """The records that are known after a step; collective where the ranks agree now."""
        if record is not None:
            return [record]
        ledger, done = self._ledger, self.steps_done
        assert ledger is not None, "a step without a record is noted"
        is_last = done % self.sampler.steps_per_epoch == 0 or done == self.total_steps
        if done % ledger.every and not is_last:
            return []
        found: list[Step | Skipped] = []
        began = perf_counter()
        found_all = ledger.agree()
        self.account.busy.met += perf_counter() - began
        if any(agreed.faulty for _, agreed in found_all):
            self.purity.expect(f"until step {self.steps_done}")
        for one, agreed in found_all:
            self.stopping = self.stopping or agreed.stopping
            found.append(self.account.record(one, agreed, agreed.grad_norm))
        return found

    def _update(
        self,
        epoch: int,
        samples: int,
        loss: Scalar,
        comm_seconds: float,
        unfit: Callable[[], str],
    ) -> Step | Skipped | None:
        # The loss is known to the tensor ranks of the last stage, each of which has all of it.
        own = loss if self.grid.place.tensor == 0 else 0.0
        if not self.summation.is_finite:
            own = nan
        told = self.account.tell(
            own,
            comm_seconds,
            self.passes.runner().waited,
            self.feed,
            stopping=self.stop.raised(),
            faulty=bool(self.purity.faults()),
        )
        agreed = self.strategy.agree(self.steps_done, self.gradient, told)
        if agreed.faulty and self._ledger is None:
            self.purity.expect(f"step {self.steps_done + 1}")
        self.account.met()
        if self._ledger is None:  # else it is of our worker alone
            self.stopping = agreed.stopping
        grad_norm = agreed.grad_norm / self.scale.value
        number = self.steps_done + 1
        failed = unfit_samples = ""
        lr = self.rates.rate(self.steps_done)
        if not agreed.finite:
            if self._ledger is None:
                return self._skip(number, loss, unfit())
            # Of our worker alone, which stays as it is until all ranks hear of it.
            failed = ", ".join(self.gradient.own_culprits(loss)[:3]) or "the norm of its gradient"
            unfit_samples = unfit()
        else:
            self._descend(agreed)
        with self.span("publish", "communicate"):
            published = self.store.publish()
        self.account.ended(published + self._after_step())
        self.summation.commit()
        self.scale.went_well()
        self.steps_done = number
        self._try_overlap(agreed.seconds / self.comm.size)
        if number == self.total_steps:
            told, agreed = self._settled(told, agreed)
        noted = Noted(
            number,
            epoch,
            samples,
            lr,
            self.strategy.exchanges,
            self.strategy.since,
            told,
            agreed.own_norm**2 * self.grid.layout.replicas[0] / self.comm.size,
            failed,
            unfit_samples,
        )
        if self._ledger is not None:
            self._ledger.noted.append(noted)
            return None
        return self.account.record(noted, agreed, grad_norm)

    def _settled(self, told: Told, agreed: Agreed) -> tuple[Told, Agreed]:
        """The last step with what came after the ranks had agreed on it, as no other tells of it;
        collective where they have."""
        whole = self.account.settled(told)
        if self._ledger is not None:
            return whole, agreed
        more = np.subtract(whole.numbers[1:], told.numbers[1:])  # the loss need not be finite
        seconds, reducing, _, _, _, sent, shared, _ = self.comm.allreduce(more).tolist()
        return whole, replace(
            agreed,
            seconds=agreed.seconds + seconds,
            comm_seconds=agreed.comm_seconds + reducing,
            sent_bytes=agreed.sent_bytes + sent,
            shared_bytes=agreed.shared_bytes + shared,
        )

    def _descend(self, agreed: Agreed) -> None:
        """Update the own pieces."""
        most, norm = self.config.optim.clip_norm, agreed.own_norm / self.scale.value
        clip = most / norm if most and norm > most else 1.0
        with self.span("update", "update"):
            unused = agreed.unused
            if self.summation.acts_alone:  # what a code has kept back comes later
                unused = self.updater.never_used(unused)
            common = self.rates.common(self.steps_done)
            self.updater.step(common, clip / self.scale.value, self.steps_done, unused)

    @property
    def dense_bytes(self) -> float:
        """That a rank sends to sum its gradients as they are, by algorithms of the least volume."""
        size = self.grid.data.size
        itemsize = np.dtype(self.config.run.dtype).itemsize
        return 2 * (size - 1) / size * self.arena.size * itemsize

    def _after_step(self) -> float:
        """Talk to the other workers, if that is due; returns seconds spent in communication."""
        with (
            self.span("exchange", "communicate"),
            self.comm.waiting("the mean of the workers' weights"),
        ):
            seconds = self.strategy.after_step(self.steps_done)
        self.passes.forget()
        return seconds

    def drain(self) -> None:
        """All workers take what they have together: every replica has the same weights.

        For the end of a run; tests and checkpoints leave workers as they are.
        """
        self.strategy.drain()
        self.refresh()

    def _skip(self, number: int, loss: Scalar, unfit: str) -> Skipped:
        self.summation.rollback()
        for name, values in self._state_before.items():
            self.state[name][...] = values
        culprits, data = self.gradient.culprits(loss), named(self.comm, unfit)
        # A loss of one's own may leave such samples out, so that a smaller scale is tried first.
        scaled = self.scale.enabled and self.scale.value > 1.0
        if self.config.run.on_nonfinite == "stop" and not scaled:
            raise NonFinite(nonfinite(number, culprits, data))
        self.scale.overflowed()
        self.account.ended(self._after_step())
        self.steps_done = number
        synced = self.account.synced(self.strategy.exchanges, self.strategy.since)
        return Skipped(number, data or culprits, self.scale.value, synced)

    def check_replicas(self, when: str) -> None:
        """Compare what several ranks hold, bit by bit: parameters and optimiser state.

        Raises:
            ReplicaMismatch: on all ranks.
        """
        # Workers that train by themselves have the same inside of each alone.
        apart = self.strategy.drifts
        replicas = self.updater.replicas(self.store.reduction.groups if apart else self.grid.groups)
        if self.state and self.grid.data.size > 1:
            replicas.append((self.grid.data, self.state))
        anchors = {
            f"{name} of {tensor.name}": flat[tensor.start : tensor.stop]
            for name, flat in self.strategy.shared().items()
            for tensor in self.arena.tensors
        }
        if anchors:
            replicas.append((self.grid.data, anchors))
        check_replicas(self.comm, replicas, when)

    def _try_overlap(self, seconds: float) -> None:
        """A step lasted so long, mean over the ranks, which all of them know."""
        trial = self._trial
        if trial is None or trial.decided:
            return
        if trial.tell(seconds):
            trial.decide(*trial.seconds)
            self._found_overlap = Overlap(self.steps_done, trial.overlap, *trial.seconds)
        self.store.set_overlap(trial.overlap)

    def found_overlap(self) -> Overlap | None:
        """What a trial that has just ended has found."""
        found, self._found_overlap = self._found_overlap, None
        return found

    def straggler(self) -> Straggler | None:
        """Who kept the others waiting since the last call, if anybody did."""
        return self.account.straggler(self.grid.place.stage, self.steps_done)

    def times(self) -> Times:
        """Where the time of each rank went since the start."""
        return self.account.times(self.grid.place)
