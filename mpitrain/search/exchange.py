"""The exchange of a job's replicas: how much they tell one another, how often, behind what."""

from collections.abc import Callable, Sequence
from math import ceil, prod
from time import perf_counter

import numpy as np

from collectives.codec import Dice
from mpitrain.arrays import Array, Shape
from mpitrain.compress.codec import LinearCodec, Remembering, Sparse
from mpitrain.config import Config
from mpitrain.parallel.compressed_summation import CodingOptions
from mpitrain.parallel.sent_bytes import adasum_bytes, coded_bytes, dense_bytes
from mpitrain.search.stages import Numerics, ReplicaExchange
from mpitrain.training.build import compression


def exchange(
    config: Config,
    shapes: Sequence[Shape],
    ranks: int,
    numerics: Numerics,
    *,
    is_sharded: bool = False,
) -> ReplicaExchange:
    """The exchange of a job's replicas, but for the seconds of its codec.

    Args:
        config: the job; its layout does not count.
        shapes: shapes of a rank's parameters.
        ranks: ranks that sum their gradients.
        numerics: bytes of numbers.
        is_sharded: whether each rank gets a shard of the sum, as with ZeRO.
    """
    sync, itemsize = config.sync, numerics.stored
    plain = dense_bytes(itemsize * sum(map(prod, shapes)), ranks) / (1 + is_sharded)
    sent, kept = plain, 0.0
    if sync.combine == "adasum":
        sent = adasum_bytes(shapes, ranks, itemsize)
    elif config.compress.codec != "none":
        how = compression(config.compress)
        sent = summed_bytes(how, shapes, ranks, itemsize, is_sharded=is_sharded)
        kept = _kept(how)
    share = sent / plain if plain else 1.0
    if not sync.drifts:
        return ReplicaExchange(share, 1, None, kept)
    averaged = numerics.slots - bool(config.optim.average)  # each worker keeps its own average
    share += averaged * (sync.state == "averaged")
    if sync.kind == "delayed":
        kept += 3 + 2 * max(1, ceil(sync.delay / sync.period))
    else:
        kept += 3 + (sync.outer != "plain")
    return ReplicaExchange(share, sync.period, sync.delay, kept)


def summed_bytes(
    how: CodingOptions, shapes: Sequence[Shape], ranks: int, itemsize: int, *, is_sharded: bool
) -> int:
    """Bytes that ranks together send in a sum by codes, which gives each a shard, or the whole."""
    elements = sum(prod(shape) for shape in shapes if how.codes(shape))
    keep = getattr(how.codec, "keep", 1.0)  # other codecs send all elements
    whole = not is_sharded or isinstance(how.codec, LinearCodec | Sparse)
    shard = None if whole else -(-elements // ranks)
    return coded_bytes(how, shapes, ranks, itemsize, round(keep * elements), shard)


def _kept(how: CodingOptions) -> float:
    """Numbers that a rank keeps for each parameter, each with its value after the step."""
    if isinstance(how.codec, Remembering):
        memory = how.codec.memory(np.zeros(1, np.float32))
        return 2.0 * len(memory.arrays)
    return 2.0 * how.feedback


def coding_seconds(how: CodingOptions, dtype: np.dtype) -> float:
    """Seconds of a codec for each parameter of a sum on two ranks, the best of some."""
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(dtype)
    run, seconds = _coder(how, x), []
    for step in range(5):
        start = perf_counter()
        run(step)
        seconds.append(perf_counter() - start)
    return min(seconds) / x.size


def _coder(how: CodingOptions, x: Array) -> Callable[[int], object]:
    """The work of a rank that sums ``x`` with another one, but for the messages."""
    codec, flat = how.codec, x.reshape(-1)
    if isinstance(codec, LinearCodec):
        sketch = codec.sketch({"x": x}, 0)
        return lambda step: list(sketch.phases(step))
    if isinstance(codec, Sparse):
        return lambda step: codec.select(flat, step)
    code = np.empty(codec.nbytes(x.size), np.uint8)

    def both_ways(step: int) -> None:
        codec.encode(flat, code, lambda: Dice(step=step).draw(0, 0))
        for _ in range(2):  # the own code, and the other's
            codec.decode(code, flat)

    return both_ways
