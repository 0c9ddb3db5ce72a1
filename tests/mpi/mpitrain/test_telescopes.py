"""What was sent and what is left are what was given, bit by bit, whatever happens to a run.

A linear layer whose loss is the product of scores and labels has gradients that depend on samples
alone.  Samples are quarters and batches a power of two, so that nothing rounds: what the weights
have moved by and what codes have left out must *be* the sum of the gradients.
"""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from mpitrain import nn
from mpitrain.checkpoint.saving import resume
from mpitrain.config import Checkpoint, Compress, Config, Optim, Run, Train
from mpitrain.data import Dataset, Samples
from mpitrain.metrics.records import Skipped
from mpitrain.objective.elementwise import ElementwiseLoss
from mpitrain.start import start
from mpitrain.training.loop import Batch
from mpitrain.training.parts import UserObjects
from tests.mpi.mpitrain.layouts import keep, whole

pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]
RANKS = MPI.COMM_WORLD.size
#: Inputs, outputs, samples, and samples of a batch.
IN, OUT, COUNT, BATCH = 12, 8, 128, 16
RATE = 2.0**-4
#: Codes whose scales are powers of two, or that send numbers as they are.
CODECS = (
    "topk:keep=0.1",
    "randomk:keep=0.25",
    "blocks:block=8,keep=0.25",
    "threshold:tau=0.0625",
    "int8:block=16,power=true",
    "int4:block=16,power=true",
    "sign:block=16,power=true",
)


class Product(ElementwiseLoss):
    """Scores times labels."""

    def compare(self, given, wanted):
        return given * wanted, wanted.copy()


def quarters():
    """Samples, one of which is infinite: the step that has it is skipped."""
    rng = np.random.default_rng(7)
    x, y = (rng.integers(-8, 9, (COUNT, n)) / 4 for n in (IN, OUT))
    x[3, 2] = np.inf
    return Dataset(Samples(x, y), Samples(x[-8:], y[-8:]), classes=0)


DATA = quarters()


def gradient(batch):
    """Of the weights, from its definition."""
    return DATA.train[batch].inputs.T @ DATA.train[batch].labels / (BATCH * OUT)


def left_out(comm, trainer):
    """By all ranks together, of the weights."""
    flat = np.zeros(trainer.parts.arena.size)
    for kept in trainer.parts.summation.kept():
        flat[kept.start : kept.start + kept.values.size] += kept.values
    comm.Allreduce(MPI.IN_PLACE, flat)
    tensor = trainer.parts.arena["linear.weight"]
    return flat[tensor.start : tensor.stop].reshape(IN, OUT)


def segment(group, config, given, until, *, goes_on):
    """Steps on these ranks; returns the sum of rate times gradient, and how many were skipped."""
    skipped = 0
    with (
        Communicator(group) as comm,
        start(
            comm,
            config,
            objects=UserObjects(
                data=DATA, layers={"linear": nn.Linear(IN, OUT, bias=False)}, loss=Product()
            ),
        ) as trainer,
    ):
        if goes_on:
            resume(trainer.parts)
        else:
            for piece in trainer.parts.store.pieces:
                piece.parameters[...] = 0
            trainer.parts.refresh()
        every = trainer.parts.sampler.steps_per_epoch
        while trainer.parts.steps_done < until:
            epoch, step = divmod(trainer.parts.steps_done, every)
            batch = list(trainer.parts.sampler.batches(epoch))[step]
            (record,) = trainer.step(Batch(epoch, [batch]))
            if isinstance(record, Skipped):
                skipped += 1
            else:
                given = given + record.lr * gradient(batch)
        (weights,) = whole(comm, trainer).values()
        left = left_out(comm, trainer)
        np.testing.assert_array_equal(RATE * left - weights, given)
        assert np.abs(left).max() > 0 or comm.size < 3
        keep(trainer)
    return given, skipped


@pytest.mark.parametrize(
    ("steps", "codec"),
    [pytest.param(500, codec, marks=pytest.mark.slow) for codec in CODECS]
    + [
        pytest.param(24, CODECS[4], marks=pytest.mark.quick_on(2, 3)),
    ],
)
def test_through_skipped_steps_checkpoints_and_other_ranks(comm, folder, steps, codec):
    """All ranks, one of them, all but the last, and all again; every eighth step is skipped."""
    epochs = -(-steps // (COUNT // BATCH))
    optim = Optim(lr=RATE, momentum=0.0, reference_batch=0)
    config = Config(
        run=Run(dtype="float64", dir=str(folder), on_nonfinite="skip"),
        optim=optim,
        train=Train(epochs=epochs, batch_size=BATCH),
        checkpoint=Checkpoint(),
        compress=Compress(codec, "on", least=1),
    )
    given, skipped = np.zeros((IN, OUT)), 0
    groups = [
        comm.Split(0, comm.rank),
        comm.Split(0 if comm.rank == 0 else 1, comm.rank),
        comm.Split(0 if comm.rank < max(1, RANKS - 1) else 1, comm.rank),
        comm.Split(0, comm.rank),
    ]
    takes_part = [True, comm.rank == 0, comm.rank < max(1, RANKS - 1), True]
    for number, (group, takes) in enumerate(zip(groups, takes_part, strict=True)):
        if takes:
            until = (number + 1) * steps // 4
            given, more = segment(group, config, given, until, goes_on=number > 0)
            skipped += more
        given, skipped = comm.bcast((given, skipped), 0)
    assert skipped == steps // 8 + (steps % 8 > 0 and skipped > steps // 8) > 0
    for group in groups:
        group.Free()
