"""A layout explained before it runs: who does what, memory, predicted time."""

import os
from collections.abc import Sequence
from math import lcm, prod

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from mpitrain import data, models
from mpitrain.arrays import Shape
from mpitrain.config import Compress, Config, ConfigError, expect
from mpitrain.metrics.words import counted, in_words
from mpitrain.parallel.grid import Coordinates, Layout
from mpitrain.parallel.sent_bytes import adasum_bytes, coded_bytes, dense_bytes
from mpitrain.pipeline.profiles import LayerProfile, measure
from mpitrain.pipeline.simulate import PassTimes, simulate
from mpitrain.training import build
from mpitrain.training.build import compression
from mpitrain.training.partition import layout_of, partition_of, schedule_of

#: Ranks whose steps are proved in half a minute.
_MOST = 1 << 16


def explain(config: Config, ranks: int) -> str:
    """Ranks, groups, stages, memory and predicted step time of a job.

    Raises:
        ConfigError: the layout cannot be.
    """
    if ranks > _MOST:
        raise ConfigError(
            f"plan -n {ranks}: at most {_MOST} ranks are explained, as the steps of each "
            "rank are proved; give a part of the replicas, which all do the same"
        )
    expect(config, "described", command="mpitrain plan")
    layout = layout_of(config, ranks)
    dataset = data.load(config.data, config.run.dtype)
    model = models.build(config, dataset)
    cut = partition_of(config, model, layout.stages)
    pipeline, report = schedule_of(config, cut.schedule, layout)
    with threadpool_limits(1, user_api="blas"):  # a core for each rank
        profile = {layer.name: layer for layer in measure(config)}
    shapes = model.shapes(list(model.layers))
    times = []
    samples, parts = config.train.batch_size, pipeline.micro_batches
    empty = f", {parts - samples} of them empty" if samples < parts else ""
    lines = [
        f"{ranks} ranks: {layout}; {config.parallel.schedule}, {parts} micro-batches of "
        f"{'up to ' if samples % parts else ''}{counted(-(-samples // parts), 'sample')}{empty}"
    ]
    for stage in range(layout.stages):
        names = [name for chunk in cut.of_stage(stage) for name in chunk]
        own = [profile[name] for name in names]
        chunks = " | ".join(map(", ".join, cut.of_stage(stage)))
        count = sum(prod(shape) for name in names for shape in shapes[name].values())
        spread = sum(prod(shapes[n][own]) for n in names for own in model.layers[n].placed)
        here = count - spread + spread / max(1, layout.experts)
        state = _megabytes(_state(config, layout, stage, count, here))
        held = report.held[stage, 0]
        times.append(_times(own, layout, config))
        lines += [
            f"stage {stage}: ranks {_ranks(layout, stage)}; {chunks}",
            f"  {count} parameters, {state} MB of them "
            f"and their state a rank, at most {held} micro-batches' activations "
            f"({_megabytes(held / pipeline.chunks * _activations(own, layout, config))} MB)",
            f"  {1e3 * (times[-1].forward):.2f} ms forward and "
            f"{1e3 * (times[-1].backward_input + times[-1].backward_weight):.2f} ms backward a "
            "micro-batch",
        ]
    found = simulate(cut.schedule.generate, pipeline, times)
    lines += predicted(found.seconds, found.bubble, config.train.batch_size, ranks, _cores())
    widest = max(range(layout.stages), key=lambda stage: layout.replicas[stage])
    names = [name for chunk in cut.of_stage(widest) for name in chunk]
    placed = {name: model.layers[name].placed if layout.experts > 1 else {} for name in names}
    kept = [s for name in names for own, s in shapes[name].items() if own not in placed[name]]
    itemsize = np.dtype(config.run.dtype).itemsize
    summed = layout.replicas[widest] * layout.context
    lines += exchanged(config, kept, summed, itemsize, found.seconds)
    if layout.experts > 1:
        m, blocks = config.model, sum(bool(own) for own in placed.values())
        each = 4 * m.top * config.data.context * m.width * (1 - 1 / layout.experts) * blocks
        sent = each * itemsize * samples / summed
        lines.append(f"experts: a rank sends {in_words(sent)} of rows a step, if choices are even")
    return "\n".join(lines)


def exchanged(
    config: Config, shapes: Sequence[Shape], replicas: int, itemsize: int, seconds: float
) -> list[str]:
    """Bytes that the replicas of a stage exchange, dense and by some codecs.

    Args:
        config: tables of the job.
        shapes: shapes of the parameters; one that tensor ranks share counts whole.
        replicas: ranks of the stage that sum their gradients.
        itemsize: bytes of a gradient.
        seconds: time of a step.
    """
    if replicas == 1:
        return []
    sync, scattered = config.sync, config.parallel.zero > 1
    # ZeRO-2 and 3 sum each micro-batch, into shards, which is half of an all-reduce.
    sums = config.train.micro_batches / 2 if scattered else 1
    dense = sums * dense_bytes(itemsize * sum(map(prod, shapes)), replicas) / replicas
    sends = f"a rank sends {in_words(dense)}"
    if sync.kind == "quorum":
        most = (replicas - 1) * itemsize * sum(map(prod, shapes))
        return [
            f"gradients: rank 0 sends {in_words(most)} a step and receives as much, waiting for "
            f"{sync.needed(replicas)} of {replicas} workers; {_rate(most, seconds)}"
        ]
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
        elements = sum(prod(shape) for shape in shapes if how.codes(shape))
        if zero > 1:
            sent = config.train.micro_batches * coded_bytes(
                how, shapes, replicas, itemsize, shard=-(-elements // replicas)
            )
        else:
            keep = getattr(how.codec, "keep", 1.0)  # other codecs send all elements
            sent = coded_bytes(how, shapes, replicas, itemsize, round(keep * elements))
        found.append((codec, sent / replicas))
    return found


def _rate(nbytes: float, seconds: float) -> str:
    return f"{8e-9 * nbytes / seconds:.3g} Gb/s to keep up with computing"


def predicted(seconds: float, bubble: float, samples: int, ranks: int, cores: int) -> list[str]:
    """Predicted speed with a core for each rank, and on this machine if it has fewer.

    Args:
        seconds: time of a step, with a core for each rank.
        bubble: the part of ``seconds`` in which a rank has nothing to do, mean over the ranks.
        samples: samples of a step.
        ranks: number of ranks.
        cores: number of cores that this process may use.
    """
    lines = [
        f"predicted with a core for each rank: {1e3 * seconds:.1f} ms a step without "
        f"communication, {samples / seconds:.0f} samples/s, bubble {bubble:.1%}"
    ]
    if cores < ranks:
        work = (1 - bubble) * ranks * seconds / cores
        here = max(seconds, work)
        lines.append(
            f"this machine has {counted(cores, 'core')} for {ranks} ranks: "
            f"{1e3 * here:.1f} ms a step at best, {samples / here:.0f} samples/s"
        )
    return lines


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _times(own: list[LayerProfile], layout: Layout, config: Config) -> PassTimes:
    """Times of a micro-batch; the profile has those of one replica."""
    part = 1 / lcm(*layout.replicas) / layout.tensor / layout.context
    forward = part * sum(layer.forward_s for layer in own)
    backward = part * sum(layer.backward_s for layer in own)
    return PassTimes(forward, backward / 2, backward / 2)


def _activations(own: list[LayerProfile], layout: Layout, config: Config) -> float:
    kept = own[:1] if config.parallel.recompute else own
    return sum(layer.activation_bytes for layer in kept) / lcm(*layout.replicas) / layout.context


def _state(config: Config, layout: Layout, stage: int, count: int, here: float) -> float:
    """Bytes of parameters, gradients and optimiser state of a rank, which has ``here`` whole."""
    item = np.dtype(config.run.dtype).itemsize
    slots = len(build.optimizer(config.optim).slots) + bool(config.optim.average)
    replicas = layout.replicas[stage] * layout.context
    zero = 1 if config.parallel.node_shared else config.parallel.zero
    sharded = count / replicas
    parameters = sharded if zero == 3 or config.parallel.node_shared else here
    gradients = sharded if zero >= 2 else here
    state = slots * (sharded if zero >= 1 else here)
    return item / layout.tensor * (parameters + gradients + state)


def _ranks(layout: Layout, stage: int) -> str:
    groups = [
        [
            layout.rank(Coordinates(stage, replica, tensor, context))
            for context in range(layout.context)
            for tensor in range(layout.tensor)
        ]
        for replica in range(layout.replicas[stage])
    ]
    ranks = ["+".join(map(str, group)) for group in groups]
    if len(ranks) > 16:
        ranks = [*ranks[:4], "...", ranks[-1]]
    return " ".join(ranks)


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.2f}"
