"""Data that are read in turn, in the trainer: every layout is torch's own loop."""

import random

import numpy as np
import pytest

import mpitrain
from mpitrain.data import DataError
from tests.mpi.mpitrain.fits import RANKS, made, torch

pytestmark = pytest.mark.at_most(5)


class Turns(torch.utils.data.IterableDataset):
    """Points of a surface, jittered anew in each epoch."""

    def __init__(self, samples, seed, jitter=0.05, wrong=(-1, -1)):
        self.samples, self.seed, self.jitter, self.wrong = samples, seed, jitter, wrong
        self.read = []

    def __len__(self):
        return self.samples

    def __iter__(self):
        draw = torch.Generator().manual_seed(self.seed)
        for number in range(self.samples):
            self.read.append(number)
            if (mpitrain_rank(), number) == self.wrong:
                raise OSError("the line is cut")
            x = torch.rand(6, generator=draw) * 4 - 2
            noise = torch.randn(()).item() + np.random.normal() + random.gauss(0, 1)
            yield x, (torch.sin(x[0]) * x[1] + x[2] * x[3] + self.jitter * noise)[None]


def mpitrain_rank():
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank


def given(jitter=0.05, **changed):
    return {"train_data": Turns(100, 1, jitter), "test_data": Turns(30, 2)} | changed


def test_what_one_rank_cannot_read_all_say(folder):
    # Of the last rank's first part of an epoch; the digest reads 8.
    wrong = (RANKS - 1, 24 - 1)
    data = {"train_data": Turns(100, 1, wrong=wrong), "test_data": Turns(30, 2)}
    trainer = made(folder, **data)
    with pytest.raises(DataError, match="sample 23 of Turns cannot be read: OSError"):
        trainer.fit()
    trainer.close()


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Turns(100, 1))


def test_what_cannot_be_is_refused(comm, folder):
    with pytest.raises(DataError, match="train_data has no length"):
        made(folder, **given(train_data=Endless()))
    with pytest.raises(DataError, match="each process would read all of train_data"):
        made(folder, **given(workers=2))
    if RANKS > 1:
        with pytest.raises(DataError, match="the ranks have different data"):
            made(folder, **given(train_data=Turns(100, comm.rank)))
    trainer = made(folder, **given(train_data=mpitrain.Stream(Endless(), 99)))
    with pytest.raises(DataError, match="more samples than its length says, 99"):
        trainer.fit()
    trainer.close()
