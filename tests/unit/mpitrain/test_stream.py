"""Samples in turn: the same whoever asks for which, and what is dropped on the way."""

import random
import sys
from contextlib import closing

import numpy as np
import pytest

from mpitrain.data import DataError
from mpitrain.data.loader import Loader, Request
from mpitrain.data.map_style import OwnSamples
from mpitrain.data.stream import Stream, Streamed


class Noisy:
    """Samples of noise, some in an order that is drawn when the pass begins."""

    def __init__(self, gives=20, says=None, wrong=-1):
        self.gives, self.says, self.wrong, self.read = gives, says or gives, wrong, []

    def __len__(self):
        return self.says

    def __iter__(self):
        order = np.random.permutation(self.gives)
        for number in range(self.gives):
            self.read.append(number)
            if number == self.wrong:
                raise OSError("the line is cut")
            yield np.array([number, order[number], random.random()]), number % 7


class Seeking(Noisy):
    """One that can begin anywhere."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def starting_at(self, number):
        for one in range(number, self.gives):
            self.read.append(one)
            yield np.array([one, self.epoch, random.random()]), one % 7

    def __iter__(self):
        return self.starting_at(0)


def read(data, epoch, indices):
    return Streamed(data, np.float64, seed=3).in_epoch(epoch)[np.array(indices)].inputs


@pytest.mark.parametrize("kind", [Noisy, Seeking])
def test_a_sample_is_the_same_whoever_asks_for_it(kind):
    whole = read(kind(), 1, range(20))
    np.testing.assert_array_equal(whole[:, 0], range(20))
    assert len(set(whole[:, 2])) == 20
    np.testing.assert_array_equal(read(kind(), 1, [3, 4, 11, 19]), whole[[3, 4, 11, 19]])
    one = Streamed(kind(), np.float64, seed=3).in_epoch(1)
    for index in (5, 6, 6, 2, 19, 0):  # also back again
        np.testing.assert_array_equal(one[[index]].inputs, whole[[index]])
    assert not (read(kind(), 2, range(20))[:, 1:] == whole[:, 1:]).all()


class Reusing:
    """Gives all samples in one array and one tensor."""

    def __init__(self, make):
        self.buffer = make(2)

    def __len__(self):
        return 3

    def __iter__(self):
        for number in range(3):
            self.buffer[:] = number + 1
            yield {"x": self.buffer, "name": "one"}, number


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_first_sample_stays_in_a_source_that_has_one_array(library):
    own = Streamed(Reusing(pytest.importorskip(library).zeros), np.float64, seed=3)
    for _ in range(2):
        np.testing.assert_array_equal(own[:3].inputs["x"], [[1, 1], [2, 2], [3, 3]])
    assert own[:1].inputs["x"].tolist() == [[1, 1]]


def test_a_collate_in_place_leaves_the_first_sample():
    own = Streamed(Reusing(np.zeros), np.float64, seed=3)
    for _ in range(2):
        first = own.first()
        assert first[0]["x"].tolist() == [1, 1]
        first[0]["x"] /= 2
        first[0].pop("name")


def test_what_can_begin_anywhere_reads_what_is_asked_for_alone():
    data, all_of = Seeking(), Noisy()
    read(data, 0, [4, 5, 9, 10])
    read(all_of, 0, [4, 5, 9, 10])
    assert data.read == [4, 5, 9, 10]
    assert all_of.read == list(range(11))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_processes_that_read_ahead_change_nothing(workers):
    own = Streamed(Seeking(40), np.float64, seed=3)
    assert len(own[:8]) == 8  # as for the digest: the processes do not go on from here
    asked = [Request("train", e, np.arange(i, i + 5)) for e in (0, 1) for i in range(0, 40, 10)]
    with closing(Loader({"train": own, "test": own}, workers, 5)) as loader:
        found = [samples.inputs for samples in loader.read(asked)]
    for request, values in zip(asked, found, strict=True):
        np.testing.assert_array_equal(values, read(Seeking(40), request.epoch, request.indices))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (Noisy(10, 20), "ends after 10 samples, and its length is 20"),
        (Noisy(21, 20), "has more samples than its length says, 20"),
        (Noisy(wrong=7), "sample 7 of Noisy cannot be read: OSError: the line is cut"),
        (Stream((n for n in range(20)), 20), "can be read once"),
        (Stream(lambda: 5, 20), "cannot be begun: TypeError"),
        (Stream(lambda: map(float, range(20)), 20), "sample 0 of Stream is a float; a pair"),
    ],
)
def test_what_cannot_be_read(data, why):
    with pytest.raises(DataError, match=why):
        read(data, 0, range(20))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_loader_with_a_generator_of_its_own_has_one_order_an_epoch(wrapped):
    """However many passes a process has begun before, as one that is resumed has not."""
    torch = pytest.importorskip("torch")

    def order(*epochs):
        own = torch.Generator().manual_seed(5)
        data = [(torch.tensor([float(n)]), n) for n in range(30)]
        loader = torch.utils.data.DataLoader(data, None, shuffle=True, generator=own)
        stream = Streamed(Stream(loader, 30) if wrapped else loader, np.float64, seed=3)
        return [stream.in_epoch(epoch)[:].labels.tolist() for epoch in epochs][-1]

    assert order(0, 1, 2) == order(2) != order(1)
    assert sorted(order(2)) == list(range(30))


class Shrinking:
    """Has fewer samples than it had, or ends the program."""

    def __init__(self, how):
        self.how, self.samples = how, 8

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        if index == 6 and self.how == "exit":
            sys.exit(0)
        if index >= self.samples:
            raise IndexError(index)
        return np.ones(2), np.ones(1)


def test_a_data_set_that_shrinks_or_ends_the_program_is_an_error_of_all_ranks():
    ending = OwnSamples(Shrinking("exit"), "float64")
    with pytest.raises(DataError, match="sample 6 of Shrinking cannot be read: SystemExit: 0"):
        ending[4:8]
    shrinking = OwnSamples(Shrinking("shrink"), "float64")
    assert len(shrinking[:8].inputs) == 8
    shrinking.data.samples = 5
    with pytest.raises(DataError, match="has 5 samples now, and had more when the run began"):
        shrinking[np.array([2, 6])]


def test_rows_of_tensors_are_read_at_once():
    """As one by one, and without a change of anybody's generators."""
    torch = pytest.importorskip("torch")
    utils = torch.utils.data
    x, y = torch.arange(40.0).reshape(10, 2, 2).double(), torch.arange(10)
    for tensors in [(x, y), (x, y, y.float()), (x, y[:, None])]:
        whole = utils.TensorDataset(*tensors)
        for data in [
            whole,
            utils.Subset(whole, [4, 2, 9, 0]),
            utils.Subset(whole, torch.tensor([5, 1, 2])),
        ]:
            for which in [slice(3), slice(0), np.array([2, 0, 2])]:
                found = OwnSamples(data, np.float32)[which]
                one_by_one = OwnSamples([data[i] for i in range(len(data))], np.float32)[which]
                for name, wanted in vars(one_by_one).items():
                    np.testing.assert_array_equal(getattr(found, name), wanted, strict=True)
    with pytest.raises(DataError, match="sample 1 of TensorDataset is a tuple of 1; a pair is"):
        OwnSamples(utils.TensorDataset(x), np.float32)[1:3]
