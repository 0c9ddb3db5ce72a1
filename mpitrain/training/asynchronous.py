"""Steps of a pipeline that does not drain between them: PipeDream's, each stage by itself."""

from time import perf_counter
from typing import cast

import numpy as np
from mpi4py import MPI

from mpitrain import nn
from mpitrain.arrays import Array
from mpitrain.metrics import Step
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.pipeline.window import UpdateWindow
from mpitrain.training.feed import Held
from mpitrain.training.placed import Placed


@np.errstate(over="ignore", invalid="ignore")
def train_window(trainer: Placed, epoch: int, batches: list[Array], held: Held) -> list[Step]:
    """Train on batches in a pipeline that drains after the last; an update each.  Collective.

    Args:
        trainer: whose steps they are.
        epoch: counted from 0.
        batches: sample indices of each, the same on all ranks.
        held: of their micro-batches those that this rank needs.

    Returns:
        A record of each update.

    Raises:
        NonFinite: on all ranks, after the window.
        ConfigError: on all ranks: a parameter had no part in the loss, or a layer, a loss or a
            metric of the program's own is no function of its inputs.
    """
    comm, passes, account = trainer.comm, trainer.passes, trainer.account
    runner = passes.runner(len(batches))
    done, start = trainer.steps_done, perf_counter()
    # The configuration has refused other stores.
    store = cast(Replicated, trainer.store)
    window = UpdateWindow(
        trainer.grid,
        store,
        trainer.gradient,
        trainer.updater,
        runner,
        trainer.config.parallel.weights,
        trainer.rates.rate,
        are_held=any(trainer.model.layers[name].holds for name in trainer.layers),
    )
    store.reset()
    source = passes.source(held, batches, trainer.scale.value)

    def context(micro_batch: int) -> nn.Context:
        step = done + micro_batch // passes.parts
        return passes.context(step, source.indices(micro_batch))

    own = runner.run(source, window.weights, store, window.update, context)
    trainer.purity.expect(f"until step {done + len(batches)}")
    lasted = perf_counter() - start
    account.busy.add(lasted, sum(updated.comm_seconds for updated in own), runner.waited)
    waiting = comm.allreduce(sum(runner.waited.values()))
    reading = comm.allreduce(trainer.feed.read_seconds)
    sent, shared = (comm.allreduce(moved) for moved in account.moved())
    seconds = lasted / len(batches)
    trainer.steps_done += len(batches)
    trainer.stopping = comm.allreduce(trainer.stop.raised(), op=MPI.LOR)
    return [
        Step(
            step=done + 1 + index,
            epoch=epoch,
            samples=len(batch),
            loss=agreed.loss,
            grad_norm=agreed.grad_norm,
            lr=trainer.rates.rate(done + index),
            seconds=seconds,
            samples_per_s=len(batch) / seconds,
            comm_share=min(1.0, agreed.comm_seconds / comm.size / seconds),
            wait_share=min(1.0, waiting / comm.size / lasted),
            read_share=min(1.0, reading / comm.size / lasted),
            sent_bytes=sent / comm.size / len(batches),
            shared_bytes=shared / comm.size / len(batches),
        )
        for index, (batch, agreed) in enumerate(
            zip(batches, window.agree(own, done, source.unfit), strict=True)
        )
    ]
