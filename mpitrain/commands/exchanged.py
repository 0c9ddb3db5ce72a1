"""Bytes that the replicas of a stage exchange in a step, dense and by codecs."""

from collections.abc import Sequence
from math import prod

from mpitrain.arrays import Shape
from mpitrain.config import Compress, Config
from mpitrain.metrics.words import digits, in_words
from mpitrain.parallel.sent_bytes import adasum_bytes, dense_bytes
from mpitrain.search.exchange import summed_bytes
from mpitrain.training.build import compression


def _dense(config: Config, shapes: Sequence[Shape], replicas: int, itemsize: int) -> float:
    """Bytes that a rank sends in a step's sums of gradients."""
    # ZeRO-2 and 3 sum each micro-batch, into shards, which is half of an all-reduce.
    sums = config.train.micro_batches / 2 if config.parallel.zero > 1 else 1
    return sums * dense_bytes(itemsize * sum(map(prod, shapes)), replicas) / replicas


def exchanged(
    config: Config, shapes: Sequence[Shape], replicas: int, itemsize: int, seconds: float
) -> list[str]:
    """Bytes that the replicas of a stage exchange, dense and by some codecs.

    Args:
        config: tables of the job.
        shapes: shapes of the parameters; one that tensor ranks share counts whole.
        replicas: ranks of the stage that sum their gradients.
        itemsize: bytes of a gradient.
        seconds: time of a step's computing.
    """
    if replicas == 1:
        return []
    sync, dense = config.sync, _dense(config, shapes, replicas, itemsize)
    sends = f"a rank sends {in_words(dense)}"
    if sync.combine == "adasum":
        dense = adasum_bytes(shapes, replicas, itemsize) / replicas
        sends, codes = f"a rank sends {in_words(dense)}", ""
    else:
        found = _coded(config, shapes, replicas, itemsize)
        codes = f"; by codes: {', '.join(f'{name} {in_words(sent)}' for name, sent in found)}"
    if not sync.drifts:
        return [f"gradients: {sends} a step as they are, {_rate(dense, seconds)}{codes}"]
    every = f"every {sync.period} steps" if sync.period > 1 else "every step"
    lasts = (sync.delay if sync.delay else sync.period) * seconds
    behind = (
        f"behind {sync.delay} steps, {1e3 * lasts:.1f} ms"
        if sync.delay
        else f"while all wait, after {1e3 * lasts:.1f} ms of computing"
    )
    return [
        f"workers' ways: {sends} {every}, {in_words(dense / sync.period)} a step, {behind}; "
        f"{_rate(dense, lasts)}{codes}"
    ]


def _coded(
    config: Config, shapes: Sequence[Shape], replicas: int, itemsize: int
) -> list[tuple[str, float]]:
    """Bytes that a rank sends in an exchange, for the job's codec and some others."""
    table, zero = config.compress, config.parallel.zero
    others = ["bf16", "int8", "powersgd:rank=4", "topk:keep=0.01"]
    if zero > 1:
        others = ["bf16", "int8:rounding=stochastic", "terngrad"]
    named = [table.codec] if table.codec != "none" else []
    found = []
    for codec in dict.fromkeys([*named, *others]):
        how = compression(Compress(codec, least=table.least))
        sent = summed_bytes(how, shapes, replicas, itemsize, is_sharded=zero > 1)
        sums = config.train.micro_batches if zero > 1 else 1
        found.append((codec, sums * sent / replicas))
    return found


def _rate(nbytes: float, seconds: float) -> str:
    return f"{digits(8e-9 * nbytes / seconds)} Gb/s to keep up with computing"
