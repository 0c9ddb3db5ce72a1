"""Plans on memory whose work is queued, as a GPU's: what is not waited for has not happened.

tests/mpi/collectives/test_device.py is on a real GPU, where there is one; here the queue is a list.
"""

import numpy as np
import pytest

from collectives.algorithms import ALGORITHMS, build
from collectives.errors import InvalidBuffer
from collectives.execution.local import run
from collectives.execution.memory import HostMemory
from collectives.execution.transport.device import DirectTransport, StagedTransport


class QueuedMemory(HostMemory):
    """NumPy arrays that change only when somebody synchronizes."""

    def __init__(self):
        self.queue = []

    def empty(self, count, dtype):
        return np.full(count, 99, dtype)

    def copy(self, target, source):
        self.queue.append(lambda: np.copyto(target, source))

    def combine(self, function):
        return lambda left, right, out: self.queue.append(lambda: function(left, right, out=out))

    def pinned(self, nbytes):
        return np.full(nbytes, 77, np.uint8)

    def download(self, host, device):
        self.copy(host, device)

    def upload(self, device, host):
        self.copy(device, host)

    def synchronize(self):
        work, self.queue[:] = list(self.queue), []
        for act in work:
            act()


class NeverWaits(QueuedMemory):
    """As if the transport had forgotten to synchronize: the work is done at the very end."""

    def synchronize(self):
        """Nothing."""

    def finish(self):
        super().synchronize()


def run_queued(schedule, inputs, transport, memory=QueuedMemory, combine=np.add):
    """Every rank's result; the inputs are written by work that is still queued."""
    memories = []

    def on(inner):
        memories.append(memory())
        return transport(inner, memories[-1]), memories[-1]

    lazily = [np.full_like(items, 55) for items in inputs]

    def started(rank):
        memories[rank].copy(lazily[rank], inputs[rank])

    results = run(schedule, lazily, combine, on=on, before=started)
    for each in memories:
        getattr(each, "finish", each.synchronize)()
    return results


@pytest.mark.parametrize("transport", [DirectTransport, StagedTransport])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.collective}-{a.name}")
def test_every_algorithm(algorithm, transport):
    for size in (1, 2, 3, 5):
        schedule = algorithm.schedule(size)
        idempotent = schedule.contract.idempotent
        combine = np.maximum if idempotent else np.add
        rng = np.random.default_rng(size)
        blocks = [schedule.contract.send_blocks(schedule.member(r)) for r in range(size)]
        inputs = [rng.integers(0, 50, 7 * n) for n in blocks]
        for got, wanted in zip(
            run_queued(schedule, inputs, transport, combine=combine),
            run(schedule, inputs, combine),
        ):
            assert (got is None and wanted is None) or np.array_equal(got, wanted)


@pytest.mark.parametrize("transport", [DirectTransport, StagedTransport])
def test_without_synchronization_the_results_are_wrong(transport):
    schedule = build("allreduce", "ring", 3)
    inputs = [np.arange(9) + rank for rank in range(3)]
    right = run(schedule, inputs)
    wrong = run_queued(schedule, inputs, transport, NeverWaits)
    assert all(map(np.array_equal, run_queued(schedule, inputs, transport), right))
    assert not any(map(np.array_equal, wrong, right))


def test_staged_messages_go_in_parts(monkeypatch):
    monkeypatch.setattr("collectives.execution.transport.device.PART_BYTES", 64)
    schedule = build("allreduce", "butterfly", 4)
    inputs = [np.arange(1000) * rank for rank in range(4)]
    for result in run_queued(schedule, inputs, StagedTransport):
        assert np.array_equal(result, 6 * np.arange(1000))


class SaysItIsOnAGpu:
    @property
    def __cuda_array_interface__(self):
        return {"shape": (3,), "typestr": "<f4", "data": (0, False), "version": 3}


def test_device_arrays_without_cupy(monkeypatch):
    from collectives.calls.buffers import read_buffer

    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    monkeypatch.setattr("collectives.execution.memory._is_device_address", lambda address: True)
    with pytest.raises(InvalidBuffer, match=r"needs CuPy: pip install 'mpitrain\[cuda13\]'"):
        read_buffer(SaysItIsOnAGpu(), "send")
