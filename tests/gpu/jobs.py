"""Short runs of the trainer on the CPU and on a device, for the same numbers of both."""

import os
from contextlib import contextmanager
from itertools import islice
from tempfile import TemporaryDirectory

import numpy as np
from mpi4py import MPI
from msgspec.structs import replace

from collectives import Communicator
from mpitrain.checkpoint.saving import checkpoints, resume, save
from mpitrain.checkpoint.writer import Writer
from mpitrain.start import start
from mpitrain.training.evaluation import evaluate
from tests.mpi.mpitrain.layouts import job


def everybody():
    """All ranks; device memory is staged unless ``COLLECTIVES_DEVICE`` says otherwise."""
    return Communicator(MPI.COMM_WORLD, device=os.environ.get("COLLECTIVES_DEVICE", "staged"))


@contextmanager
def trainer_on(device, config, **given):
    """A trainer on all ranks."""
    with (
        everybody() as comm,
        start(comm, replace(config, run=replace(config.run, device=device)), **given) as trainer,
    ):
        yield trainer


def trained(device, config, steps=3, **given):
    """(loss, gradient norm) of each step, and the test."""
    with trainer_on(device, config, **given) as trainer:
        records = list(islice(trainer.run_epoch(0), steps))
        tested = evaluate(trainer.parts, 0)
        trainer.parts.check_replicas("at the end")
        return [(r.loss, r.grad_norm) for r in records], (tested.test_loss, tested.metrics)


def moved(config):
    """Losses of six steps on the CPU, and of two each on the CPU, a device and the CPU again.

    The latter go by checkpoints from one to the next.
    """
    with TemporaryDirectory() as own:
        config = replace(config, run=replace(config.run, dir=MPI.COMM_WORLD.bcast(own)))
        with trainer_on("cpu", config) as trainer:
            right = [record.loss for record in islice(trainer.run_epoch(0), 6)]
        found = []
        for device in ("cpu", "cuda", "cpu"):
            with trainer_on(device, config) as trainer:
                resume(trainer.parts)
                found += [record.loss for record in islice(trainer.run_epoch(0), 2)]
                place = checkpoints(trainer.parts.config)
                writer = Writer(trainer.parts.comm, place, keep=2, device=trainer.parts.device)
                save(trainer.parts, writer)
                writer.finish()
        MPI.COMM_WORLD.Barrier()  # rank 0's folder goes
    return right, found


def expect_near(found, right, rtol):
    """Numbers of a device beside the CPU's.

    On the stand-in they are NumPy's, but for the order of sums over many ranks and over views.
    """
    import cupy

    if hasattr(cupy, "machine"):
        rtol = 0 if MPI.COMM_WORLD.size < 3 and rtol < 1e-2 else 1e-5
    np.testing.assert_allclose(found, right, rtol=rtol)


def small(**parallel):
    """A transformer of two blocks, in a layout."""
    config = job("gpt", "float32", batch_size=8, micro_batches=2, **parallel)
    return replace(config, model=replace(config.model, layers=2))
