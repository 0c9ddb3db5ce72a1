"""The loop over an epoch's steps; its subclasses have the step, as in ``step.py``."""

from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from math import isnan, nan
from typing import NamedTuple, cast

import numpy as np

from collectives import Communicator, CorruptMessage
from mpitrain.arrays import Array, Scalar
from mpitrain.config import ConfigError
from mpitrain.data.everywhere import batches_of
from mpitrain.metrics.records import Record
from mpitrain.parallel.data_parallel import WholeGradients
from mpitrain.parallel.summation import uncountable
from mpitrain.pipeline.runtime import reads
from mpitrain.pipeline.stage import Latest
from mpitrain.ranks.together import ClosedTogether, together
from mpitrain.training.batches import MicroBatches
from mpitrain.training.feed import Held
from mpitrain.training.parts import Parts
from mpitrain.training.passes import Passes
from mpitrain.update.agreement import mean_correction

#: Samples that the program's shadow compares with plain torch, if a batch has so many.
FEW = 4


class Batch(NamedTuple):
    """Samples of one step, or of several steps that are taken together.

    Attributes:
        epoch: number of the pass over the samples, counted from 0.
        indices: indices of the samples of each step, the same on all ranks.
        held: samples of the micro-batches that this rank needs; ``None``: not read yet.
    """

    epoch: int
    indices: Sequence[Array]
    held: Held | None = None


class Computed(NamedTuple):
    """The work of this rank in the forward and backward passes of a step.

    Attributes:
        loss: this rank's part of the mean loss.
        sum_seconds: seconds spent in the sum of gradients.
        waits: seconds of waiting for other stages, by rank.
    """

    loss: Scalar
    sum_seconds: float
    waits: Mapping[int, float]


class Loop(ClosedTogether):
    """Takes the steps of a job.  A subclass defines a step.

    Use it in a ``with`` statement, or call :meth:`close`.  All methods are collective.

    Attributes:
        parts: the job on this rank.
        check_every: steps from one comparison of the replicas to the next; 0: the end of an epoch
            alone, which is always one.
        window: number of steps whose samples are read together; None: one.
    """

    parts: Parts
    window: int | None = None

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.check_every = parts.config.run.check_every

    def batches(self, epoch: int) -> Generator[Batch]:
        """Read the batches of an epoch that are not done yet, in turn."""
        return read_batches(self.parts, epoch, remaining(self.parts, epoch), self.window)

    @abstractmethod
    def step(self, batch: Batch) -> Sequence[Record]:
        """Train on a batch.

        Returns:
            The records of the steps that all ranks know now: none, one, or several.

        Raises:
            NonFinite: on all ranks: a loss or a gradient is not finite, and the job skips no step.
            ConfigError: on all ranks: a layer, a loss or a metric of the program's own is not a
                function of its inputs.
            DataError: on all ranks: a rank cannot read a sample.
            RuntimeError: the loop is closed, or a pass has failed.
        """

    def steps(self, epoch: int) -> Generator[Sequence[Record]]:
        """Take the steps of an epoch that are not done yet; yields the records of each batch.

        Raises:
            ReplicaMismatch: on all ranks: replicas hold different values.
            CorruptMessage: on one rank: a message does not fit its checksum; names the step.
            ConfigError: on all ranks: rates follow tests, which nobody runs.
            Exception: as :meth:`step`.
        """
        parts, is_checked = self.parts, False
        if parts.measured_rates:
            parts.measured_rates.expect_led()
        done = parts.steps_done
        parts.account.begin()
        with closing(self.batches(epoch)) as batches:
            for batch in batches:
                if parts.spikes and done + 1 in parts.spikes.left_out:
                    # These samples count as done.
                    parts.count_steps(done, batch.indices)
                    done = parts.steps_done
                    yield []
                    if parts.ending:
                        return
                    continue
                if parts.padding:
                    parts.padding.look(batch.indices[0])
                if parts.shadows:
                    self._compare_shadow(batch)
                try:
                    records = self.step(batch)
                except CorruptMessage as error:
                    raise CorruptMessage(f"step {parts.steps_done + 1}: {error}") from error
                yield records
                if parts.stopping or parts.ending:
                    return
                is_checked = is_due(self.check_every, done, parts.steps_done)
                done = parts.steps_done
                if is_checked:
                    with parts.account.apart():
                        parts.check_replicas(f"after step {parts.steps_done}")
        if not is_checked:
            parts.check_replicas(f"after epoch {epoch}")

    def _compare_shadow(self, batch: Batch) -> None:
        """Let the program's shadow compare a step before it is taken; collective."""
        parts, shadow = self.parts, self.parts.objects.shadow
        batch = _with_first(parts, batch)
        together(parts.comm, lambda: shadow and shadow(parts, batch), ConfigError)

    def run_epoch(self, epoch: int) -> Iterator[Record]:
        """Take the steps of an epoch that are not done yet; yields one record at a time."""
        for records in self.steps(epoch):
            yield from records

    def close(self) -> None:
        """Free the communicators; a second call does nothing."""
        self.parts.close()


def _with_first(parts: Parts, batch: Batch) -> Batch:
    """The batch, where rank 0 also gets others' first samples if it has few; collective."""
    held = {n: one for n, one in (batch.held or {}).items() if len(one)}
    if parts.comm.bcast(sum(map(len, held.values()))) < FEW:
        count, cuts = len(batch.indices[0]), parts.passes.micro_batches
        first = {n: one for n, one in held.items() if n < cuts and n * count // cuts < FEW}
        for own in parts.comm.gather(first) or ():
            held |= own
    return batch._replace(held=held)


def is_due(every: int, before: int, done: int) -> bool:
    """Whether a multiple of ``every`` is in (``before``, ``done``], as a loop may take several
    steps together; 0: never."""
    return every > 0 and done // every > before // every


def remaining(parts: Parts, epoch: int) -> Iterator[Array]:
    """Indices of the samples of each step of an epoch that is not done yet; collective.

    Raises:
        DataError: on all ranks: a program's own sampler fails, or gives ranks other samples.
    """
    if epoch > parts.epoch:
        raise ValueError(f"epoch {epoch} cannot begin: the steps of epoch {parts.epoch} come first")
    end = (epoch + 1) * parts.sampler.steps_per_epoch + parts.rates.ahead
    left = max(0, min(end, parts.total_steps) - parts.steps_done)
    if not left:
        return iter(())
    return islice(batches_of(parts.comm, parts.sampler, epoch, parts.seen), left)


def read_batches(
    parts: Parts, epoch: int, indices: Iterator[Array], window: int | None = None
) -> Generator[Batch]:
    """Read the samples of each step, or of each ``window`` of steps of an asynchronous pipeline."""

    def needed(steps: int) -> list[int]:
        pipeline, report = parts.passes.schedule(steps if window else 1)
        return reads(pipeline, report, parts.grid.place)

    reading = parts.feed.batches(
        "train", epoch, indices, window or 1, parts.passes.micro_batches, needed
    )
    with closing(reading):
        for own, held in reading:
            yield Batch(epoch, own, held)


def compute_gradient(
    parts: Parts, passes: Passes, step: int, source: MicroBatches, ranks: Communicator | None = None
) -> Computed:
    """Take the micro-batches of a step forward and backward, and complete the sum of gradients,
    which the pieces of ``parts.store`` have afterwards.

    Args:
        parts: the job on this rank.
        passes: passes of the ranks that take part.
        step: number of the step, counted from 0.
        source: the micro-batches.
        ranks: sharers of the gradient; None: some ranks take no part in the step.
    """
    runner = passes.runner()

    def complete_sums(_: int, loss: Scalar) -> tuple[Scalar, float]:
        waiting = parts.comm.waiting("the sum of gradients", by_all=ranks is not None)
        with parts.span("reduce", "communicate"), waiting:
            if parts.counting is not None:
                loss = loss * _divide_by_counted(parts, source, parts.counting)
            return loss, parts.store.wait()

    count_labels(parts, source, parts.counting or ranks)
    with parts.passing():
        (found,) = runner.run(
            source,
            Latest(passes.weights),
            parts.store,
            complete_sums,
            lambda m: passes.context(step, source.indices(m), source.terms(m)),
        )
    if parts.model.adds_losses and parts.device.read([source.unequal])[0]:
        parts.purity.fault = uncountable(  # all ranks raise it when they agree on the step
            step, "layers add losses, as routers of experts do,"
        )
    fault = parts.gradient.unequal_copies(passes.dtype.itemsize)
    parts.purity.fault = parts.purity.fault or fault
    return Computed(*found, runner.waited)


def count_labels(parts: Parts, source: MicroBatches, ranks: Communicator | None) -> None:
    """Count the labels before the passes, if ``ranks`` share a gradient; collective."""
    is_last = parts.grid.place.stage == parts.partition.stage_of([*parts.model.layers][-1])
    if ranks is not None:
        source.count_labels(partial(parts.gradient.total, ranks=ranks), has_labels=is_last)


def _divide_by_counted(parts: Parts, source: MicroBatches, ranks: Communicator) -> float:
    """Divide this rank's gradients by the counted labels of ``ranks``, not by all; collective.

    Returns the factor; NaN if no label counts.
    """
    (counted,) = parts.device.read([source.counted])
    is_first = parts.grid.place.tensor == 0  # the tensor ranks of a stage count the same labels
    totals = np.array([source.labels_taken, counted] if is_first else [0.0, 0.0])
    parts.gradient.total(totals, ranks)
    factor = mean_correction(*totals.tolist())
    if factor != 1:
        cast(WholeGradients, parts.store).gradients[...] *= factor
    # Nothing is left for the factor of agree(), which is 1 then.
    source.labels_taken, source.counted = 0, nan if isnan(factor) else 0.0
    return factor
