"""DataLoaders of torch, taken apart: those that the trainer would read otherwise are refused."""

import numpy as np
import pytest
import torch

from mpitrain.data import DataError
from mpitrain.data.loaders import taken
from mpitrain.data.stream import Stream

utils = torch.utils.data
Divided = utils.DistributedSampler


class Ones(Divided):
    def __iter__(self):
        return iter([1] * len(self))


class Shifted(utils.DataLoader):
    def __iter__(self):
        return (batch + 100 for batch in super().__iter__())


class Filtered(utils.DataLoader):
    def _get_iterator(self):
        return iter([])


class InTurn(utils.IterableDataset):
    def __iter__(self):
        return iter(range(50))


@pytest.mark.parametrize(
    ("sampler", "drop_last", "sizes", "distinct"),
    [
        (Divided(range(50), 2, 1), True, [16] * 3, 48),
        (Divided(range(50), 2, 1, drop_last=True), False, [16] * 3 + [2], 50),
        (Divided(range(10), 1, 0), False, [8, 2], 10),
        (Ones(range(50), 1, 0), False, [8] * 6 + [2], 1),
        (utils.SequentialSampler(range(10)), False, [8, 2], 10),
        (utils.RandomSampler(range(20)), True, [8, 8], 16),
        (utils.SequentialSampler(list(range(50))), False, [8] * 6 + [2], 50),
    ],
)
def test_a_sampler_gives_its_own_samples(sampler, drop_last, sizes, distinct):
    loader = utils.DataLoader(range(50), 8, sampler=sampler, drop_last=drop_last)
    found = taken("train_data", loader)
    batches = list(found.sampler(50, found.batch_size, seed=0).batches(0))
    assert [len(batch) for batch in batches] == sizes
    assert len(set(np.concatenate(batches).tolist())) == distinct


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (Shifted(range(50), 8), r"Shifted has its own __iter__\(\).* in collate_fn$"),
        (Filtered(range(50), 8), r"Filtered has its own _get_iterator\(\)"),
        (Shifted(InTurn(), 8), "Shifted has its own"),
        (Stream(Shifted(InTurn(), 8), 50), "Shifted has its own"),
        (Stream(utils.DataLoader(range(50), 8), 20), "has samples by number; give the Data"),
        (utils.DataLoader(range(50), 8, sampler=[]), "train_data: list is empty"),
        (utils.DataLoader(range(50), batch_sampler=[]), "train_data: list is empty"),
        *(
            (utils.DataLoader(range(50), 8, sampler=one), "make it with num_replicas=1, rank=0")
            for one in (Ones(range(50), 2, 0), Divided(range(10), 2, 0))
        ),
    ],
)
def test_a_loader_that_is_read_otherwise_is_refused(loader, message):
    with pytest.raises(DataError, match=message):
        taken("train_data", loader)
