"""``mpitrain.Trainer``: in every layout, a torch module trains as in one process."""

import random

import numpy as np
import pytest

from tests.mpi.mpitrain.fits import RANKS, WHOLE, Block, Waves, Whole, assert_as_alone, made, torch
from tests.zoo.parts import Of

pytestmark = pytest.mark.at_most(5)
Dropout = torch.nn.Dropout


def also_unread():
    """Two results, of which a loss may read one: batch norm of the other goes backward nowhere."""
    parts = {"enter": torch.nn.Linear(6, 4), "norm": torch.nn.BatchNorm1d(4)}
    two = lambda y: torch.stack((y, 2 * y), -1)  # noqa: E731 values of one sample
    gives = lambda m, x: (m.leave(x), m.norm(two(m.enter(x))))  # noqa: E731
    return Of(gives, **parts, leave=torch.nn.Linear(6, 1))


def test_a_rank_without_samples_from_the_first_step_on(comm, folder, alone):
    """It knows what the loss does not read although it has never called it with samples."""
    changed = {"model": also_unread, "metrics": {}, "train_data": Waves(6, 1), "batch_size": 1}
    changed |= {"loss": lambda y, t: (y[0] - t).square().mean(), "epochs": 1}
    with made(folder, **changed) as trainer:
        assert_as_alone(trainer.fit(), trainer.module, alone(**changed))


def test_ranks_read_their_own_samples_and_what_is_frozen_stays(folder):
    train_data = Waves(100, 1)
    with made(folder, **WHOLE, train_data=train_data) as trainer:
        trainer.fit()
    assert len(train_data.read) <= 2 * (100 // RANKS + 10) + 20  # a few for the digest
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        begin = Whole().state_dict()
    values = trainer.module.state_dict().items()
    frozen = {name for name, value in values if torch.equal(value, begin[name])}
    assert frozen == {"blocks.1.up.weight", "blocks.1.up.bias"}


class Woven(Whole):
    """Stages share a dropout, and weights of blocks, in another order on the last stage."""

    def __init__(self):
        super().__init__()
        self.blocks, self.drop = torch.nn.ModuleList(Block(16) for _ in range(4)), Dropout(0.1)
        for one, other in ((3, 0), (2, 1)):
            self.blocks[one].up = self.blocks[other].up
            self.blocks[one].norm.weight = self.blocks[other].norm.weight

    def forward(self, x):
        x = self.enter(x) * self.gain
        for block in self.blocks:
            x = self.drop(block(x))
        return self.leave(self.drop(x) * self.gain)


@pytest.mark.mpi(min_size=2)
@pytest.mark.at_most(4)
def test_weights_that_stages_share_have_one_sum_and_cuts_change_no_mask(folder, alone):
    parallel = {"pipe": RANKS, "bucket_bytes": 256}
    with made(folder, model=Woven, cuts="blocks", parallel=parallel) as trainer:
        assert_as_alone(trainer.fit(), trainer.module, alone(model=Woven))


def generators():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_what_samples_draw_is_new_in_each_epoch_and_not_the_programs(comm, folder):
    before = generators()
    with made(folder) as trainer:
        first, again, later = (trainer.parts.data.train.in_epoch(n)[:5] for n in (0, 0, 1))
    assert np.array_equal(first.labels, again.labels)
    assert not np.array_equal(again.labels, later.labels)
    assert generators() == before
