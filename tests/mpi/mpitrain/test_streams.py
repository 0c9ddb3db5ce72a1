"""Data that are read in turn, in the trainer: every layout is torch's own loop."""

import random

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.data import DataError
from tests.mpi.mpitrain.fits import RANKS, made, torch

pytestmark = pytest.mark.at_most(5)


class Turns(torch.utils.data.IterableDataset):
    """Points of a surface, jittered anew in each epoch."""

    def __init__(self, samples, seed, wrong=(-1, -1)):
        self.samples, self.seed, self.wrong, self.read = samples, seed, wrong, []

    def __len__(self):
        return self.samples

    def __iter__(self):
        draw = torch.Generator().manual_seed(self.seed)
        for number in range(self.samples):
            self.read.append(number)
            if (MPI.COMM_WORLD.rank, number) == self.wrong:
                raise OSError("the line is cut")
            x = torch.rand(6, generator=draw) * 4 - 2
            noise = torch.randn(()).item() + np.random.normal() + random.gauss(0, 1)
            yield x, (torch.sin(x[0]) * x[1] + x[2] * x[3] + 0.05 * noise)[None]


def of(train_data, **changed):
    return {"train_data": train_data, "test_data": Turns(30, 2)} | changed


def test_what_one_rank_cannot_read_all_say(folder):
    # Of the last rank's first part of an epoch; the digest reads 8.
    data = of(Turns(100, 1, wrong=(RANKS - 1, 24 - 1)))
    told = "sample 23 of Turns cannot be read: OSError"
    with made(folder, **data) as trainer, pytest.raises(DataError, match=told):
        trainer.fit()


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Turns(100, 1))


def test_what_cannot_be_is_refused(comm, folder):
    for data, told in (
        (of(Endless()), "train_data has no length"),
        (of(Turns(100, 1), workers=2), "each process would read all of train_data"),
        (of(Turns(100, comm.rank)), "the ranks have different data"),
    )[: 2 + (RANKS > 1)]:  # one rank has no other data
        with pytest.raises(DataError, match=told):
            made(folder, **data)
