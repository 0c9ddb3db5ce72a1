"""Scenarios that a fault in the order of a GPU's work spoils: each says whether all was right."""

import gc
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np

from collectives.algorithms import build
from collectives.execution.tags import Tags
from mpitrain.device.cuda import Cuda
from tests import queued_cupy
from tests.gpu.jobs import small, trainer_on
from tests.local.device_ranks import Ranks
from tests.queued_cupy.counts import counts
from tests.queued_cupy.memory import POISON

SIZE = 3


def _fits(ranks, total):
    return all(np.array_equal(got, total) for got in ranks.results()) and not ranks.machine.races


def _begun(patch, seed, road):
    """Ranks, an all-reduce that they have started, and its result."""
    ranks = Ranks(patch, SIZE, road, seed)
    plans, total = ranks.all_reduce()
    ranks.start(plans)
    return ranks, plans, total


def direct(patch, seed, road="direct"):
    """One all-reduce of what a stream of the caller's still writes."""
    ranks, plans, total = _begun(patch, seed, road)
    ranks.wait(plans)
    return _fits(ranks, total)


def late(patch, seed):
    """The caller queues more after the start, which is not to be waited for."""
    ranks, plans, total = _begun(patch, seed, "direct")
    first = ranks.outputs
    more, _ = ranks.all_reduce(tags=Tags(1))
    ranks.start(more)  # behind its input, while the first one is under way
    ranks.move(plans, more)
    for plan in (*plans, *more):
        plan.synchronize()
    return not ranks.machine.races and all(np.array_equal(a._a, total) for a in first)


def staged(patch, seed):
    """The sum by way of the host."""
    return direct(patch, seed, "staged")


def receives(patch, seed):
    """A broadcast, whose leaves only receive, into what a stream still reads."""
    ranks = Ranks(patch, SIZE, "direct", seed)
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
    ranks = Ranks(patch, SIZE, "staged", seed)
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


def _tested(patch, road, seed):
    """An all-reduce until Test is true, wherever the caller is, and its result."""
    ranks, plans, total = _begun(patch, seed, road)
    for _ in range(1000):
        if all([plan.Test() for plan in plans]):
            break
    return ranks, total


def read(patch, seed, road="staged"):
    """The host reads once Test is true."""
    ranks, total = _tested(patch, road, seed)
    return all(np.array_equal(out._a, total) for out in ranks.outputs)


def elsewhere(patch, seed):
    """The plan moves on where another GPU and another stream are current."""
    return _fits(*_tested(patch, "direct", seed))


def torch(patch, seed):
    """PyTorch's stream writes the input, and then the output."""
    ranks = Ranks(patch, SIZE, "direct", seed)
    streams = dict(enumerate(ranks.streams))
    library = ModuleType("torch")
    library.cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_stream=lambda gpu: SimpleNamespace(cuda_stream=streams[gpu].ptr),
    )
    patch.setitem(sys.modules, "torch", library)
    plans, total = ranks.all_reduce()
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
    ranks = Ranks(patch, SIZE, "staged", seed)
    first, total = ranks.all_reduce(tags=Tags(0))
    outputs = ranks.outputs
    second, more = ranks.all_reduce(61, tags=Tags(1))
    outputs = [(outputs, total), (ranks.outputs, more)]
    for _ in range(3):
        ranks.start(first)
        ranks.start(second)
        ranks.move(first, second)
        for plans in (first, second):
            ranks.wait(plans)
        for ranks.outputs, wanted in outputs[::-1]:
            if not _fits(ranks, wanted):
                return False
    return True


def dropped(patch, seed):
    """Nobody has closed the communicator, and its last copies are still queued."""
    ranks, plans, total = _begun(patch, seed, "staged")
    ranks.wait(plans)
    plans.clear()
    ranks.transports.clear()
    gc.collect()
    return _fits(ranks, total)


def unheld(patch, seed, road="direct"):
    """The host waits for nothing that was queued before: gates are asked."""
    ranks = Ranks(patch, SIZE, road, seed)
    plans, total = ranks.all_reduce()
    before = ranks.machine.waits
    ranks.start(plans)
    nothing = all((out._a.view(np.uint8) == POISON).all() for out in ranks.outputs)
    ranks.wait(plans)
    return (nothing or seed) and ranks.machine.waits == before and _fits(ranks, total)


def later(patch, seed, road="direct"):
    """A plan ends before a long pass, behind whose end another plan starts, as buckets do."""
    ranks = Ranks(patch, SIZE, road, seed)
    first, total = ranks.all_reduce(tags=Tags(0))
    ranks.start(first)
    outputs, reached = ranks.outputs, []
    for rank in range(SIZE):
        with ranks.at(rank):
            done = partial(reached.append, rank)
            ranks.machine.launch(ranks.streams[rank].queue(), "a long pass", done)
    second, more = ranks.all_reduce(30, tags=Tags(1))
    ranks.start(second)
    while not all([plan.Test() for plan in first]):
        pass
    right = seed or not reached  # in a drawn order it may be
    right = right and all(np.array_equal(out._a, total) for out in outputs)
    ranks.wait(second)
    return right and _fits(ranks, more)


def brought(patch, seed):
    """Snapshots of what a stream still computes, in memory that another array has at once."""
    cupy = queued_cupy.install(patch, queued_cupy.Machine(seed=seed))
    device, right = Cuda(0), []
    for turn in range(1, 6):
        twice = device.put(np.arange(60)) * 2 * turn
        coming = device.snapshot(twice)
        del twice
        cupy.full(60, turn)
        right.append(np.array_equal(coming.get(), np.arange(60) * 2 * turn))
        right.append(np.array_equal(device.get(cupy.full(60, turn)), np.full(60, turn)))
    return all(right) and not cupy.machine.races


def trained(patch, seed):
    """Two steps of a transformer: the CPU's numbers, for which the host waits once a step."""
    cupy = queued_cupy.install(patch, queued_cupy.Machine(seed=seed))
    config, found = small(), []
    for device in ("cpu", "cuda"):
        with trainer_on(device, config) as trainer:
            steps = trainer.run_epoch(0)
            found.append([next(steps).loss])
            counts.reset()
            found[-1].append(next(steps).grad_norm)
            waited = counts.waited
            steps.close()
    return found[0] == found[1] and waited == 1 and not cupy.machine.races


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
