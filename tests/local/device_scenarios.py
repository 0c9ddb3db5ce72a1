"""What a fault in the order of a GPU's work would spoil: each says whether all was right."""

import gc
import sys
from types import ModuleType, SimpleNamespace

import numpy as np

from collectives.algorithms import build
from collectives.execution.tags import Tags
from mpitrain.device.cuda import Cuda
from tests import queued_cupy
from tests.local.device_ranks import Ranks

SIZE = 3


def _ranks(patch, road, seed):
    return Ranks(patch, SIZE, road, seed)


def _plans(ranks, count=60, algorithm="ring", tags=None):
    inputs = [np.arange(count) * (rank + 1) for rank in range(SIZE)]
    sends = [ranks.put(rank, items) for rank, items in enumerate(inputs)]
    plans = ranks.bind(build("allreduce", algorithm, SIZE), sends, [count] * SIZE, tags=tags)
    return plans, sum(inputs)


def _fits(ranks, total):
    right = all(np.array_equal(got, total) for got in ranks.results())
    return right and not ranks.machine.races


def direct(patch, seed, road="direct"):
    """One all-reduce of what a stream of the caller's still writes."""
    ranks = _ranks(patch, road, seed)
    plans, total = _plans(ranks)
    ranks.start(plans)
    ranks.wait(plans)
    return _fits(ranks, total)


def late(patch, seed):
    """The caller queues more after the start, which is not to be waited for."""
    ranks = _ranks(patch, "direct", seed)
    plans, total = _plans(ranks)
    ranks.start(plans)
    first = ranks.outputs
    more, _ = _plans(ranks, tags=Tags(1))
    ranks.start(more)  # behind its input, while the first one is under way
    ranks.move(plans, more)
    for plan in (*plans, *more):
        plan.synchronize()
    return not ranks.machine.races and all(np.array_equal(a._a, total) for a in first)


def staged(patch, seed):
    """The same by way of the host."""
    return direct(patch, seed, "staged")


def receives(patch, seed):
    """A broadcast, whose leaves only receive, into what a stream still reads."""
    ranks = _ranks(patch, "direct", seed)
    schedule = build("broadcast", "binomial_tree", SIZE)
    sends = [ranks.put(rank, np.arange(60)) for rank in range(SIZE)]
    plans = ranks.bind(schedule, sends, [60] * SIZE)
    before = []
    for rank, out in enumerate(ranks.outputs):
        with ranks.at(rank):
            before.append(None if out is None else out.copy())
    ranks.start(plans)
    ranks.wait(plans)
    kept = [ranks._read(rank, copy) for rank, copy in enumerate(before)]
    return not ranks.machine.races and all(k is None or not k.any() for k in kept)


def again(patch, seed):
    """A persistent plan, several times, on other numbers."""
    ranks = _ranks(patch, "staged", seed)
    inputs = [ranks.put(rank, np.zeros(60, int)) for rank in range(SIZE)]
    plans = ranks.bind(build("allreduce", "ring", SIZE), inputs, [60] * SIZE, tags=Tags(0))
    for turn in range(1, 4):
        for rank, items in enumerate(inputs):
            with ranks.at(rank):
                items[...] = turn * (rank + 1)
        ranks.start(plans)
        ranks.wait(plans)
        if not _fits(ranks, np.full(60, turn * 6)):
            return False
    return True


def read(patch, seed):
    """The host reads once Test is true."""
    ranks = _ranks(patch, "staged", seed)
    plans, total = _plans(ranks)
    ranks.start(plans)
    for _ in range(1000):
        if all([plan.Test() for plan in plans]):
            break
    return all(np.array_equal(out._a, total) for out in ranks.outputs)


def elsewhere(patch, seed):
    """The plan moves on where another GPU and another stream are current."""
    ranks = _ranks(patch, "direct", seed)
    plans, total = _plans(ranks)
    ranks.start(plans)
    for _ in range(1000):
        if all([plan.Test() for plan in plans]):
            break
    return _fits(ranks, total)


def torch(patch, seed):
    """PyTorch's stream writes the input, and then the output."""
    ranks = _ranks(patch, "direct", seed)
    streams = dict(enumerate(ranks.streams))
    library = ModuleType("torch")
    library.cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_stream=lambda gpu: SimpleNamespace(cuda_stream=streams[gpu].ptr),
    )
    patch.setitem(sys.modules, "torch", library)
    plans, total = _plans(ranks)
    for rank, plan in enumerate(plans):
        with ranks.cupy.cuda.Device(rank):
            plan.Start()
    ranks.move(plans)
    for rank, plan in enumerate(plans):
        with ranks.cupy.cuda.Device(rank):
            plan.Wait()
    return _fits(ranks, total)


def pinned(patch, seed):
    """Two plans, of which one takes the pinned memory of the other."""
    ranks = _ranks(patch, "staged", seed)
    first, total = _plans(ranks, tags=Tags(0))
    outputs = ranks.outputs
    second, more = _plans(ranks, 61, tags=Tags(1))
    for _ in range(3):
        ranks.start(first)
        ranks.start(second)
        ranks.move(first, second)
        for plans in (first, second):
            ranks.wait(plans)
        if not _fits(ranks, more):
            return False
        ranks.outputs, outputs = outputs, ranks.outputs
        if not _fits(ranks, total):
            return False
        ranks.outputs, outputs = outputs, ranks.outputs
    return True


def dropped(patch, seed):
    """Nobody has closed the communicator, and its last copies are still queued."""
    ranks = _ranks(patch, "staged", seed)
    plans, total = _plans(ranks)
    ranks.start(plans)
    ranks.wait(plans)
    plans.clear()
    ranks.transports.clear()
    gc.collect()
    return _fits(ranks, total)


def ahead(patch, seed):
    """Micro-batches that are brought while others are computed, one of which nobody asks for."""
    cupy = queued_cupy.install(patch, queued_cupy.Machine(seed=seed))
    device = Cuda(0)
    held = [np.arange(60) + 100 * m for m in range(6)]
    coming = device.ahead(held[0])
    for m, wanted in enumerate(held):
        found = coming()
        coming = device.ahead(held[m + 1 - len(held)])
        twice = cupy.add(found, found)  # in memory that the last one's result has had
        del found
        device.ahead(wanted)
        if not np.array_equal(device.get(cupy.add(twice, twice)), 4 * wanted):
            return False
    return not cupy.machine.races
