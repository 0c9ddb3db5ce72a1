"""Samples that processes read ahead: their order, their errors, and how the processes end."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from mpitrain.data import DataError, Samples
from mpitrain.data.loader import Loader, Request
from mpitrain.data.map_style import OwnSamples

ROOT = Path(__file__).parents[3]


class Noisy:
    """Samples of noise from every generator there is, slow ones among them."""

    def __init__(self, count=50, wrong=-1):
        self.count, self.wrong = count, wrong

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.wrong:
            raise OSError("the disc is gone")
        time.sleep(0.003 * (index % 3))
        return np.array([index, random.random(), np.random.rand()]), index % 7


def requests(count=12, epoch=0, most=5):
    rng = np.random.default_rng(epoch)
    drawn = (rng.integers(0, 50, rng.integers(0, most + 1)) for _ in range(count))
    return [Request("train", epoch, indices) for indices in drawn]


def loader(workers, data=None, most=5):
    own = OwnSamples(data or Noisy(), np.float64, seed=3)
    return closing(Loader({"train": own, "test": own}, workers, most))


def found(workers, asked):
    with loader(workers) as reader:
        return list(reader.read(asked))


def expect_alike(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.inputs, other.inputs)
        np.testing.assert_array_equal(one.labels, other.labels)
        assert (one.inputs.dtype, one.labels.dtype) == (other.inputs.dtype, other.labels.dtype)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_the_order_and_every_value_are_those_without_processes_and_stay(workers):
    asked = requests() + requests(epoch=1)
    expect_alike(found(0, asked), found(workers, asked))


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_it_may_be_left_in_the_middle(taken):
    """Later requests are not answered with what was asked for before."""
    with loader(2) as reader:
        with closing(reader.read(requests())) as reading:
            for _ in range(taken):
                next(reading)
        again = list(reader.read(requests(epoch=1)))
    expect_alike(again, found(0, requests(epoch=1)))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_samples_that_cannot_be_read(workers):
    asked = [Request("train", 0, np.array([i])) for i in range(20)]
    with loader(workers, Noisy(wrong=9)) as reader:
        reading = reader.read(asked)
        assert [next(reading).labels.item() for _ in range(9)] == [i % 7 for i in range(9)]
        with pytest.raises(DataError, match="sample 9 of Noisy cannot be read: OSError: the disc"):
            next(reading)
        assert len(list(reader.read(asked[:5]))) == 5


class Growing(Noisy):
    def __getitem__(self, index):
        return np.arange(1.0 + index % 40), index


def longest(samples):
    """A batch as long as the longest sample."""
    length = max(len(values) for values, _ in samples)
    padded = [np.pad(values, (0, length - len(values))) for values, _ in samples]
    return np.stack(padded), np.array([number for _, number in samples])


def test_samples_that_are_longer_than_the_first():
    """Memory that was made for the first one grows, in the process and here."""
    own = OwnSamples(Growing(), np.float64, seed=3, collate=longest)
    asked = requests(40, most=9)
    with closing(Loader({"train": own, "test": own}, 2, 1)) as reader:
        there = list(reader.read(asked))
    expect_alike(there, [own[request.indices] for request in asked])


class Deadly(Noisy):
    def __getitem__(self, index):
        if index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_process_that_is_killed_is_an_error():
    with loader(2, Deadly()) as reader, pytest.raises(DataError, match=r"ended .killed by SIGKILL"):
        list(reader.read([Request("train", 0, np.array([i])) for i in range(9)]))


def test_arrays_in_memory():
    whole = Samples(np.arange(20.0).reshape(10, 2), np.arange(10))
    with closing(Loader({"train": whole, "test": whole[:3]}, 2, 4)) as reader:
        asked = [Request("train", 0, np.array([7, 1])), Request("test", -1, np.array([2]))]
        one, two = reader.read(asked)
    np.testing.assert_array_equal(one.inputs, [[14, 15], [2, 3]])
    np.testing.assert_array_equal(two.labels, [2])


def test_processes_say_nothing_when_their_answers_are_not_read(capfd):
    with loader(2) as reader:
        next(reader.read(requests()))
        while not all(pipe.poll() for pipe in reader._pipes):
            time.sleep(0.01)
    assert not capfd.readouterr().err


#: A process whose loader's processes read for ever, if they are asked to, and that ends somehow.
OWNER = """
import os, signal, threading, time
import numpy as np
from mpitrain.data import Samples
from mpitrain.data.loader import Loader, Request

class Slow:
    def __getitem__(self, which):
        if not isinstance(which, slice):
            time.sleep(600)
        return Samples(np.zeros((1, 1)), np.zeros(1))

# A shell that starts the tests in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
loader = Loader({"train": Slow()}, 2, 1)
reading = loader.read([Request("train", 0, np.array([0]))] * 9)
print(*(process.pid for process in loader._processes), flush=True)
"""
SOON = "threading.Timer(0.5, {}).start()\nnext(reading)"
ENDS = {
    "normal": "",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)",
    "killed while they read": SOON.format("os.kill, (os.getpid(), signal.SIGKILL)"),
    "interrupted while they read": SOON.format("os.killpg, (0, signal.SIGINT)"),
    "exit while they read": SOON.format("os._exit, (3,)"),
}


@pytest.mark.parametrize("how", ENDS)
def test_processes_end_with_their_owner(how):
    owner = subprocess.run(
        [sys.executable, "-c", OWNER + ENDS[how]],
        cwd=ROOT, capture_output=True, text=True, timeout=60, start_new_session=True,
    )  # fmt: skip
    processes = [f"/proc/{number}" for number in owner.stdout.split()]
    assert len(processes) == 2, owner.stderr
    deadline = time.monotonic() + 60
    while (left := [*filter(os.path.exists, processes)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_a_signal_to_the_job_leaves_them_to_their_owner():
    """As a batch system sends it to every process, before the time is up."""
    with loader(2) as reader:
        for process in reader._processes:
            os.kill(process.pid, signal.SIGTERM)
            os.kill(process.pid, signal.SIGINT)
        assert len(list(reader.read(requests()))) == 12
