"""A layout explained before it runs: who does what, memory, predicted time."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, prod

import msgspec

from mpitrain.auto_stages import auto_stages_on
from mpitrain.commands.beside import beside
from mpitrain.commands.machine import MOST_RANKS, machine
from mpitrain.commands.steps import table
from mpitrain.config import Config, ConfigError, Server, load
from mpitrain.metrics.words import counted, digits, in_words
from mpitrain.parallel.grid import Coordinates, Layout
from mpitrain.search.candidates import Candidate
from mpitrain.search.job import Job, load_job
from mpitrain.search.layouts import Search
from mpitrain.search.machine import Machine
from mpitrain.search.planned import Planned, planned
from mpitrain.search.servers import ServerExchange
from mpitrain.search.stages import StageCosts
from mpitrain.search.step import PredictedStep
from mpitrain.search.whole import operations, to_the_end
from mpitrain.server.roles import roles

#: Layers of a chunk that are all named.
_LISTED = 8


def run(options: argparse.Namespace) -> None:
    """Print a job's layout, and others beside it."""
    config = load(options.config, options.set)
    against = [beside(words, "--against") for words in options.against]
    others = [load(options.config, [*options.set, *words]) for words in against]
    step_s = 1e-3 * options.step_ms if options.step_ms else None
    counts = bool(options.flops)
    print(explain(config, machine(options), others, is_counted=counts, step_s=step_s))


def explain(
    config: Config,
    cluster: Machine,
    others: Sequence[Config] = (),
    *,
    is_counted: bool = False,
    step_s: float | None = None,
) -> str:
    """Ranks, groups, stages, memory and predicted step time of a job.

    Args:
        config: the job.
        cluster: the ranks and the links between them.
        others: the job in other layouts, for a table.
        is_counted: whether costs of layers are counted from their shapes; else each is timed here.
        step_s: seconds that the job computes in a step, in the place of those predicted.

    Raises:
        ConfigError: a layout cannot be.
    """
    if cluster.ranks > MOST_RANKS:
        raise ConfigError(
            f"plan -n {cluster.ranks}: at most {MOST_RANKS} ranks are explained, as the steps of "
            "each rank are proved; give a part of the replicas, which all do the same"
        )
    served = config.server
    if served.ranks:
        roles(served, cluster.ranks)
        if others:
            raise ConfigError(
                "--against: workers and servers have one layout; compare others by --set "
                "server.ranks=0"
            )
        config = msgspec.structs.replace(config, server=Server())
    nodes = [rank // cluster.per_node for rank in range(cluster.ranks)]
    config, stages = auto_stages_on(config, nodes)
    job = load_job(config, "mpitrain plan")
    search = job.search(cluster, is_counted=is_counted)
    found = planned(job, search, config)
    if step_s:
        computing = found.step.computing
        if served.ranks:
            computing = _served(found, search, served).computing(served.ranks)
        search = search.slowed(step_s / computing)
        found = planned(job, search, config)
    if served.ranks:
        return "\n".join(_with_servers(served, found, job, search))
    lines = [stages] * bool(stages) + [
        *_stages(found, job),
        *_predicted(found, is_counted=is_counted),
    ]
    lines += to_the_end(job, config, found.step.seconds)
    held = {f"rank of stage {stage}": own for stage, own in enumerate(found.step.memory)}
    lines += _beyond(held, cluster.memory)
    if found.layout.replicas == (cluster.ranks,) and cluster.ranks > 1:
        lines += _ring_or_servers(found, job, search)
    if others:
        beside = [found, *(planned(job, search, other) for other in others)]
        rows = [
            (f"{one}{', beyond --memory' * (max(one.step.memory) > cluster.memory)}", one.step)
            for one in beside
        ]
        lines += ["", *table(rows, config.train.batch_size)]
    return "\n".join(lines)


def _stages(found: Planned, job: Job) -> list[str]:
    """Who does what, and what each rank holds."""
    layout, pipeline = found.layout, found.pipeline
    samples, parts = found.config.train.batch_size, pipeline.micro_batches
    empty = f", {parts - samples} of them empty" if samples < parts else ""
    equal = len(set(layout.replicas)) == 1 < layout.replicas[0]
    each = f" ({parts // layout.replicas[0]} a replica)" * equal
    lines = [
        f"{counted(layout.ranks, 'rank')}: {layout}; {found.config.parallel.schedule}, "
        f"{counted(parts, 'micro-batch')}{each} of {'up to ' if samples % parts else ''}"
        f"{counted(-(-samples // parts), 'sample')}{empty}"
    ]
    for stage, (own, spans) in enumerate(zip(found.costs, found.spans, strict=True)):
        held, times, of = found.report.held[stage, 0], own.passes(spans), own.sums.of(spans)
        forward = sum(one.forward for one in times)
        backward = sum(one.backward_input + one.backward_weight for one in times)
        count = sum(prod(shape) for *_, shape in job.model.trained_in(found.names(stage)))
        state, kept = own.state(of), own.kept(of, held, found.pipeline.chunks)
        lines += [
            f"stage {stage}: ranks {_ranks(layout, stage)}; "
            f"{' | '.join(map(_listed, found.cut.of_stage(stage)))}",
            f"  {count} parameters, {in_words(state)} of them and their "
            f"state a rank, activations of at most {counted(held, 'micro-batch')} "
            f"({in_words(kept)})",
            f"  {1e3 * forward:.2f} ms forward and {1e3 * backward:.2f} ms backward a micro-batch",
        ]
    return lines


def _predicted(found: Planned, *, is_counted: bool) -> list[str]:
    """Time of a step and bytes that ranks send in it."""
    sync, step = found.config.sync, found.step
    samples, ranks = found.config.train.batch_size, found.layout.ranks
    cores = ranks if is_counted else len(os.sched_getaffinity(0))
    lines = predicted(step, samples, ranks, cores)
    sent = {key: value for key, value in step.sent.items() if value}
    if sent:
        each = ", ".join(f"{in_words(value)} {_PURPOSE[key]}" for key, value in sent.items())
        lines.append(f"a rank sends at most {in_words(sum(sent.values()))} a step: {each}")
    if shared := sent.get("gradients"):
        behind = sync.delay / sync.period if sync.drifts and sync.delay else 1.0
        rate = gigabits(shared, behind * step.computing)
        lines.append(f"gradients: {digits(rate)} Gb/s to keep up with computing")
    return lines


def gigabits(nbytes: float, seconds: float) -> float:
    """Gb/s of a link that sends so many bytes while a rank computes."""
    return 8e-9 * nbytes / seconds


def _beyond(ranks: Mapping[str, float], limit: float) -> list[str]:
    """Ranks, with the bytes that each needs, that do not have as many."""
    return [
        f"beyond --memory: a {who} holds {digits(held / 2**30)} GiB, and a rank has "
        f"{digits(limit / 2**30)} GiB; take more ranks or micro-batches, or let mpitrain search "
        "find a layout that fits"
        for who, held in ranks.items()
        if held > limit
    ]


#: Purposes of bytes, in words.
_PURPOSE = {
    "gradients": "of gradients and parameters",
    "pipe": "between stages",
    "tensor": "within tensor groups",
    "context": "of keys and values, or of rows of images",
    "experts": "of rows to experts or tables, if choices are even",
}


def _ring_or_servers(found: Planned, job: Job, search: Search) -> list[str]:
    """The step that servers would make of a job that has none."""
    served = _served(found, search, Server(bound=0))
    best = served.best()
    ring, theirs = found.step.seconds, served.seconds(best)
    times = round(theirs / ring, 2)
    advice = "" if times == 1 else f"; take {'[server]' if times < 1 else 'the sum of gradients'}"
    return [
        _intensity(found, job),
        f"servers: {counted(best, 'server')} of {found.layout.ranks} ranks would take "
        f"{1e3 * theirs:.2f} ms a step, {times:.2f} times this sum of gradients' "
        f"{1e3 * ring:.2f} ms{advice}",
    ]


def _with_servers(own: Server, found: Planned, job: Job, search: Search) -> list[str]:
    """A job with servers, beside the sum of gradients on all ranks."""
    workers = search.machine.ranks - own.ranks
    nbytes, numerics = _nbytes(found), search.numerics
    served = _served(found, search, own)
    seconds, best, ring = served.seconds(own.ranks), served.best(), found.step.seconds
    samples = found.config.train.batch_size
    waiting = "synchronous" if own.synchronous else "asynchronous"
    slots = nbytes * (1 + numerics.slots) / own.ranks
    pulled, pushed = (times * nbytes for times in served.moved)
    costs, held = found.costs[0], found.report.held[0, 0]
    more = found.layout.ranks / workers  # samples than a rank has without servers
    worker = 2 * nbytes + more * float(costs.kept(costs.sums.whole, held))
    return [
        f"{search.machine.ranks} ranks: {counted(workers, 'worker')}, "
        f"{counted(own.ranks, 'server')}, {waiting}",
        f"  {_nbytes(found) / numerics.stored:.0f} parameters: "
        f"{in_words(2 * nbytes)} of them and their gradients a worker, {in_words(slots)} of them "
        "and their state a server",
        f"predicted with a core for each rank: {1e3 * seconds:.2f} ms a step with communication, "
        f"{samples / seconds:.0f} samples/s",
        f"a worker pulls {in_words(pulled)} and pushes {in_words(pushed)} a step; a server moves "
        f"{in_words((pulled + pushed) * workers / own.ranks)}",
        _intensity(found, job),
        f"fastest with {counted(best, 'server')}: {1e3 * served.seconds(best):.2f} ms a step; all "
        f"{search.machine.ranks} ranks without servers: {1e3 * ring:.2f} ms",
        *to_the_end(job, found.config, seconds),
        *_beyond({"worker": worker, "server": slots}, search.machine.memory),
    ]


def _served(found: Planned, search: Search, own: Server) -> ServerExchange:
    """``found`` is the job on all ranks, which are replicas."""
    costs, parts = found.costs[0], found.pipeline.micro_batches / found.layout.ranks
    fixed = parts * _passes(replace(costs, machine=replace(search.machine, rate=inf, stream=inf)))
    grows = parts * _passes(costs) - fixed
    return ServerExchange(
        search.machine,
        _nbytes(found),
        grows / (parts * costs.samples) * search.batch,
        fixed,
        own.synchronous,
        1 / own.fetch,
        1 / own.push,
        search.exchange(Candidate(1, 2, 1)).share,
        _nbytes(found) / search.numerics.stored * search.numerics.stepping,
    )


def _passes(costs: StageCosts) -> float:
    """Seconds of a micro-batch's passes through all layers."""
    whole = costs.sums.whole
    return float(costs.forward(whole) + costs.backward(whole))


def _nbytes(found: Planned) -> float:
    """Bytes of all parameters."""
    own = found.costs[0]
    return float(sum(own.parameters(own.sums.whole))) * own.numerics.stored


def _intensity(found: Planned, job: Job) -> str:
    """Operations of a rank's part of a step for each byte of gradients."""
    if (each := operations(job)) is None:
        return "arithmetic intensity: unknown, as a program's own model has no counted operations"
    share = each * found.config.train.batch_size / found.layout.ranks / _nbytes(found)
    return f"arithmetic intensity: {digits(share)} operations for each byte of gradients"


def predicted(step: PredictedStep, samples: int, ranks: int, cores: int) -> list[str]:
    """Predicted speed with a core for each rank, and on this machine if it has fewer ``cores``."""
    seconds, communicating = step.seconds, step.seconds - step.computing
    lines = [
        f"predicted with a core for each rank: {1e3 * seconds:.2f} ms a step, of which "
        f"{1e3 * communicating:.2f} ms communication, {samples / seconds:.0f} samples/s, "
        f"bubble {step.bubble:.1%}"
    ]
    if cores < ranks:
        here = max(seconds, (1 - step.bubble) * ranks * step.computing / cores)
        lines.append(
            f"this machine has {counted(cores, 'core')} for {ranks} ranks: "
            f"{1e3 * here:.2f} ms a step at best, {samples / here:.0f} samples/s"
        )
    return lines


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


def _listed(names: Sequence[str]) -> str:
    """The layers of a chunk, or the ends of many."""
    if len(names) <= _LISTED:
        return ", ".join(names)
    return f"{', '.join(names[:2])} ... {names[-1]} ({len(names)} layers)"
