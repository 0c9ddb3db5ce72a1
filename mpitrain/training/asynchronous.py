"""PipeDream: a pipeline that does not drain between steps; each stage updates by itself."""

from collections.abc import Generator
from time import perf_counter
from typing import cast

import numpy as np
from mpi4py import MPI

from mpitrain import nn
from mpitrain.metrics.records import Step
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.pipeline.updates import UpdateWindow
from mpitrain.step.agreement import Agreed
from mpitrain.step.ledger import LocalStep
from mpitrain.training.loop import Batch, Loop, read_batches, remaining


class AsynchronousLoop(Loop):
    """Takes ``parallel.window`` steps at a time; the pipeline drains after the last of them."""

    def batches(self, epoch: int) -> Generator[Batch]:
        parts = self.parts
        parts.account.begin()
        return read_batches(parts, epoch, remaining(parts, epoch), parts.config.parallel.window)

    @np.errstate(over="ignore", invalid="ignore")
    def step(self, batch: Batch) -> list[Step]:
        """Train on the batches of a window, with one update for each.

        Raises:
            NonFinite: on all ranks, after the window.
            ConfigError: on all ranks: as :meth:`Loop.step`, or a parameter had no part in the loss.
        """
        parts = self.parts
        parts.before_step(parts)
        comm, passes, purity = parts.comm, parts.passes, parts.purity
        done, count, start = parts.steps_done, len(batch.indices), perf_counter()
        runner = passes.runner(count)
        store = cast(Replicated, parts.store)  # the configuration has refused other stores
        window = UpdateWindow(
            parts.grid,
            store,
            parts.gradient,
            parts.updater,
            runner,
            parts.config.parallel.weights,
            parts.rates.rate,
            are_held=any(parts.model.layers[name].holds for name in parts.layers),
        )
        store.reset()
        assert batch.held is not None, "batches() has read them"
        source = passes.source(batch.held, batch.indices, parts.scale.value)

        def context(micro_batch: int) -> nn.Context:
            step = done + micro_batch // passes.parts
            return passes.context(step, source.indices(micro_batch))

        own = runner.run(source, window.weights, store, window.update, context)
        purity.expect(f"until step {done + count}")
        lasted = perf_counter() - start
        comm_seconds = sum(updated.comm_seconds for updated in own)
        parts.account.add(lasted, comm_seconds, runner.waited)
        waiting = sum(runner.waited.values())
        spent = waiting, parts.feed.read_seconds
        waited, reading = (comm.allreduce(one) / count for one in spent)
        sent, shared = (comm.allreduce(one) / count for one in parts.account.moved())
        parts.steps_done += count
        parts.stopping = comm.allreduce(parts.stop.raised(), op=MPI.LOR)
        found, seconds = [], comm.size * lasted / count
        for step, update in enumerate(window.agree(own, done, source.unfit), done):
            samples = len(batch.indices[step - done])
            told = LocalStep(step + 1, batch.epoch, samples, parts.rates.rate(step))
            times = seconds, update.comm_seconds, waited, reading
            agreed = Agreed(update.loss, *times, sent_bytes=sent, shared_bytes=shared)
            found.append(parts.account.record(told, agreed, update.grad_norm))
        return found
