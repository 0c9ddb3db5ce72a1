"""The order of samples and the shares of ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.data import Sampler
from mpitrain.group import share


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 3))
def test_an_epoch_has_every_sample_once(samples, batch_size, epoch):
    batches = list(Sampler(samples, batch_size, seed=0).batches(epoch))
    sizes = [len(batch) for batch in batches]
    assert sorted(np.concatenate(batches)) == list(range(samples))
    assert len(sizes) == Sampler(samples, batch_size, seed=0).steps_per_epoch
    assert set(sizes[:-1]) <= {batch_size}
    assert 1 <= sizes[-1] <= batch_size


@given(st.integers(0, 100), st.integers(1, 17))
def test_shares_are_contiguous_and_even_to_one_item(length, size):
    items = list(range(length))
    parts = [items[share(length, rank, size)] for rank in range(size)]
    assert [item for part in parts for item in part] == items
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1


def orders(seed, epoch):
    return np.concatenate(list(Sampler(100, 7, seed).batches(epoch)))


def test_order_depends_on_seed_and_epoch_alone():
    np.testing.assert_array_equal(orders(1, 2), orders(1, 2))
    assert (orders(1, 2) != orders(1, 3)).any()
    assert (orders(1, 2) != orders(2, 2)).any()


@pytest.mark.parametrize("seed", [0, 5])
def test_first_epoch_is_not_the_stream_of_the_parameters(seed):
    assert (orders(seed, 0) != np.random.default_rng(seed).permutation(100)).any()
