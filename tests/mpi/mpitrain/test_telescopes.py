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
from mpitrain.config import Checkpoint, Compress, Config, Optim, Run, Sync, Train
from mpitrain.data import Dataset, Samples
from mpitrain.metrics.records import Skipped
from mpitrain.objective.elementwise import ElementwiseLoss
from mpitrain.start import start
from mpitrain.sync import Quorum
from mpitrain.training.loop import Batch
from mpitrain.training.parts import UserObjects
from tests.mpi.mpitrain.layouts import keep, whole
from tests.mpi.mpitrain.test_quorum import sums
from tests.mpi.mpitrain.test_sync_arithmetic import workers

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


@pytest.mark.parametrize("exchange", ["two_phase", "gathered"])
@pytest.mark.parametrize(
    ("steps", "codec"),
    [pytest.param(500, codec, marks=pytest.mark.slow) for codec in CODECS]
    + [
        pytest.param(24, CODECS[4], marks=pytest.mark.quick_on(2, 3)),
    ],
)
def test_through_skipped_steps_checkpoints_and_other_ranks(comm, folder, steps, codec, exchange):
    """All ranks, one of them, all but the last, and all again; every eighth step is skipped."""
    if exchange == "gathered":
        if steps < 100 or not codec.startswith(("threshold", "int", "sign")):
            pytest.skip("this code is not gathered, or was")
    elif codec.startswith(("topk", "randomk", "blocks")):
        exchange = "auto"
    epochs = -(-steps // (COUNT // BATCH))
    optim = Optim(lr=RATE, momentum=0.0, reference_batch=0)
    config = Config(
        run=Run(dtype="float64", dir=str(folder), on_nonfinite="skip"),
        optim=optim,
        train=Train(epochs=epochs, batch_size=BATCH),
        checkpoint=Checkpoint(),
        compress=Compress(codec, "on", least=1, exchange=exchange),
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


def late_ones(steps):
    """Choices of a quorum in which those past the largest power of two of workers come late, in
    drawn steps; then they have no gradient of the next step."""
    rng, punctual = np.random.default_rng(11), 1 << (RANKS - 1).bit_length() - 1
    found, step = {}, 1
    while step <= steps:
        if step < steps and rng.random() < 0.4:
            found[step] = tuple((step,) if w < punctual else () for w in range(RANKS))
            found[step + 1] = tuple((step + 1,) if w < punctual else (step,) for w in range(RANKS))
            step += 2
        else:
            found[step] = ((step,),) * RANKS
            step += 1
    return found


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("steps", [pytest.param(500, marks=pytest.mark.slow), 40])
def test_through_stragglers_that_are_left_out(comm, steps):
    """A mean over 2**k workers, times p, is exact for quarters, and so is one over all."""
    choices = late_ones(steps)
    computed = {(w, s) for taken in choices.values() for w, own in enumerate(taken) for s in own}

    def quarter(worker, step):
        size = workers_of.parameters.size
        return np.random.default_rng([worker, step]).integers(-8, 9, size) / 4

    workers_of = workers(comm)
    quorum = Quorum(workers_of, Sync("quorum", quorum=1.0), choices)
    moved, given = np.zeros((2, workers_of.parameters.size))
    for step, (total, taken, has_computed, _) in enumerate(sums(comm, quorum, steps, quarter), 1):
        assert taken == choices[step] and has_computed == ((comm.rank, step) in computed)
        moved += total * (sum(map(len, taken)) / comm.size)
    for worker, step in computed:
        given += quarter(worker, step - 1)
    np.testing.assert_array_equal(moved, given)
    assert len(computed) < steps * comm.size  # some were late
    quorum.quiesce()
    assert not quorum.state()["quorum.late"].any()
    quorum.close()
