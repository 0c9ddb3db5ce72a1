"""``mpitrain search``: the fastest layouts of a job, found before anything runs."""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from math import gcd
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from collectives.analysis.topology import NETWORK, NODE, LinkCost
from collectives.commands.arguments import above_zero, positive
from mpitrain.config import Config, ConfigError, expect, load
from mpitrain.config.numbers import toml

if TYPE_CHECKING:
    from collectives.commands.program import Commands
    from mpitrain.data.dataset import Dataset
    from mpitrain.search.layers import LayerCost
    from mpitrain.search.layouts import Found, Search
    from mpitrain.search.stages import Candidate

#: Seconds of a small layer's pass on a GPU: some tens of kernels.
_LAUNCH_S = 5e-4


def add(commands: "Commands") -> None:
    """Adds the command."""
    text = "find the fastest layouts of a job: data, pipe, tensor, ZeRO, micro-batches"
    parser = commands.add_parser("search", help=text)
    add_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, help="TOML file for the first one's tables")
    text = "train the first K layouts for some steps with mpiexec, and put the fastest one first"
    parser.add_argument("--time", type=positive, metavar="K", help=text)
    parser.set_defaults(act=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what describes the job and the machine."""
    from mpitrain.commands.offline import add_job

    add_job(parser)
    add = parser.add_argument
    add("-n", "--ranks", type=positive, required=True, help="number of ranks")
    add("--nodes", type=positive, default=1, help="nodes, each with equally many ranks (1)")
    rate = (
        "matrix-product operations that a rank does in a second, as 1e14; the costs of layers then "
        "come from their shapes alone. Without it, each layer is timed on this machine"
    )
    add("--flops", type=above_zero, help=rate)
    stream = "GB/s of a rank's memory, for --flops (layers of little work take no time)"
    add("--stream", type=above_zero, metavar="GB/S", help=stream)
    add("--memory", type=above_zero, metavar="GIB", help="GiB that a rank may use (no limit)")
    link = "latency in microseconds and GB/s between"
    add("--inside", type=_link, default=NODE, help=f"{link} ranks of a node (0.5,150)")
    add("--network", type=_link, default=NETWORK, help=f"{link} nodes (1.5,25)")
    add("--adapters", type=positive, default=1, help="network ports of a node (1)")
    add("--top", type=positive, default=10, help="layouts to show (10)")


def run(options: argparse.Namespace) -> None:
    """Print the fastest layouts, what was refused, and the tables of the first one."""
    config = load(options.config, options.set)
    sought = job(config, options)
    found = sought.fastest(options.top, allowed(config, sought))
    refused = [f"refused: {count} with {why}" for why, count in sought.refused.most_common()]
    if not found:
        raise ConfigError("no layout fits; " + "; ".join(refused))
    print("\n".join([*_table(found, sought.batch), *refused]))
    if options.time:
        found = _timed(found[: options.time], options)
    tables = _tables(found[0])
    print(f"\n{tables}")
    if options.output:
        options.output.write_text(tables + "\n", encoding="utf-8")


def _timed(found: "list[Found]", options: argparse.Namespace) -> "list[Found]":
    """The layouts by their measured steps, which are printed."""
    times = [measured(options, ran) for ran in found]
    order = sorted(range(len(found)), key=times.__getitem__)
    print("\nmeasured ms")
    for at in order:
        print(f"{1e3 * times[at]:11.2f}  {found[at]}")
    return [found[at] for at in order]


def measured(options: argparse.Namespace, ran: "Found", steps: int = 20) -> float:
    """Seconds of the median step of a layout, which trains ``steps`` steps with ``mpiexec``.

    Raises:
        ConfigError: the job did not run; the message has what it printed last.
    """
    from mpitrain.metrics.reader import read_records
    from mpitrain.metrics.records import Step

    with tempfile.TemporaryDirectory() as folder:
        words = [os.environ.get("MPIEXEC", "mpiexec"), "-n", str(options.ranks), sys.executable]
        words += ["-m", "mpitrain", "train", str(options.config)]
        own = keys(ran) | {"run.dir": folder, "train.steps": steps}
        for key in [*options.set, *(f"{key}={toml(value)}" for key, value in own.items())]:
            words += ["--set", key]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"{ran}: {done.stderr.strip().rpartition(chr(10))[2]}")
        log = read_records(Path(folder) / "metrics.jsonl")
    seconds = [record.seconds for record in log.records if isinstance(record, Step)]
    return median(seconds[len(seconds) // 4 :])


def _link(text: str) -> LinkCost:
    """A link from ``microseconds,GB/s``."""
    try:
        alpha, rate = (float(part) for part in text.split(","))
        if not (0 <= alpha < np.inf and 0 < rate < np.inf):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no latency,rate as in 1.5,25") from None
    return LinkCost(alpha * 1e-6, 1e-9 / rate)


def job(config: Config, options: argparse.Namespace) -> "Search":
    """The job, the machine and the costs of the layers.

    Raises:
        ConfigError: the job has a model or data of its own or spreads experts, or nodes do not
            divide the ranks.
    """
    from mpitrain.search.layouts import Search
    from mpitrain.search.machine import Machine
    from mpitrain.search.stages import Numerics
    from mpitrain.step.precision import compute_type
    from mpitrain.training import build

    expect(config, "described", command="mpitrain search")
    if config.parallel.experts > 1:
        raise ConfigError(
            "parallel.experts: mpitrain search leaves all experts on each replica; leave it out, "
            "and set it in the layout that is found"
        )
    if options.ranks % options.nodes:
        raise ConfigError(f"--nodes {options.nodes}: does not divide the {options.ranks} ranks")
    machine = Machine(
        options.ranks,
        options.ranks // options.nodes,
        options.flops or 1.0,
        options.stream * 1e9 if options.stream and options.flops else np.inf,
        _LAUNCH_S if options.flops else 0.0,
        options.memory * 2**30 if options.memory else np.inf,
        options.inside,
        options.network,
        options.adapters,
    )
    stored = np.dtype(config.run.dtype)
    slots = len(build.optimizer(config.optim).slots) + bool(config.optim.average)
    computed = compute_type(config.run.compute, config.run.dtype)
    numerics = Numerics(stored.itemsize, computed.itemsize, slots)
    layers = _layers(config, measured=not options.flops)
    positions = config.model.kind == "gpt"
    batch = config.train.batch_size
    return Search(layers, machine, batch, numerics, _shareable(config), positions)


def _shareable(config: Config) -> int:
    """Number that a tensor group's ranks must divide; 0 if the layers cannot be shared."""
    match config.model.kind:
        case "gpt":
            return gcd(config.model.heads, 4 * config.model.width)
        case "mlp":
            return gcd(*config.model.hidden) if config.model.hidden else 0
        case "convnet" | "vgg" | "resnet":
            return gcd(*config.model.channels)
        case _:
            return 0


def _layers(config: Config, *, measured: bool) -> "list[LayerCost]":
    """Costs of the layers for a sample: in seconds on this machine, or in operations."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    from mpitrain import models
    from mpitrain.pipeline.profiles import measure
    from mpitrain.search.layers import layer_costs

    plain = _with(config, recompute=False)
    data = _dataset(plain)
    layers = layer_costs(models.build(plain, data), data.input_shape)
    if not measured:
        return layers
    with threadpool_limits(1, user_api="blas"):  # a core for each rank
        profile = measure(plain)
    samples = max(1, config.train.batch_size // config.train.micro_batches)
    return [
        replace(layer, forward=own.forward_s / samples, backward=own.backward_s / samples)
        for layer, own in zip(layers, profile, strict=True)
    ]


def _dataset(config: Config) -> "Dataset":
    """The job's data; for tokens of a known vocabulary, their shape without the files."""
    from mpitrain import data
    from mpitrain.data.dataset import Dataset, Samples

    own = config.data
    if own.name == "tokens" and own.vocabulary and not Path(own.path).exists():
        nothing = np.zeros((0, own.context), np.int64)
        return Dataset(Samples(nothing, nothing), None, own.vocabulary)
    return data.load(own, config.run.dtype)


def allowed(config: Config, search: "Search") -> "list[Candidate]":
    """The candidates that the job's other methods go together with."""
    found = []
    for candidate in search.candidates():
        try:
            _applied(config, candidate)
        except ValueError as why:
            search.refused[str(why)] += 1
        else:
            found.append(candidate)
    return found


def _applied(config: Config, layout: "Candidate") -> Config:
    """The job in a layout; ``ValueError`` if its methods do not go together."""
    return _with(
        config,
        pipe=layout.pipe,
        tensor=layout.tensor,
        sequence=layout.sequence,
        data=layout.data,
        zero=layout.zero,
        recompute=layout.recompute,
        partition="even",
        replicas=(),
        schedule="1f1b",
        chunks=1,
    )


def _with(config: Config, **keys: object) -> Config:
    from msgspec.structs import replace as changed

    return changed(config, parallel=changed(config.parallel, **keys))


def _table(found: "list[Found]", batch: int) -> list[str]:
    lines = ["   ms a step  samples/s  computing  GiB a rank  layout"]
    lines += [
        f"{1e3 * ran.seconds:12.2f} {batch / ran.seconds:10.0f} {ran.busy:10.1%} "
        f"{ran.memory / 2**30:11.3g}  {ran}"
        for ran in found
    ]
    return lines


def keys(ran: "Found") -> dict[str, object]:
    """The keys of a job that choose a layout."""
    layout = ran.layout
    found: dict[str, object] = {
        "parallel.pipe": layout.pipe,
        "parallel.tensor": layout.tensor,
        "parallel.sequence": layout.sequence,
        "parallel.data": layout.data,
        "parallel.zero": layout.zero,
        "parallel.recompute": layout.recompute,
        "train.micro_batches": layout.micro_batches,
    }
    if layout.pipe > 1:
        found |= {"parallel.partition": ran.cut.sizes, "parallel.schedule": ran.schedule}
    return found


def _tables(ran: "Found") -> str:
    """The keys of a layout as tables of a job file."""
    lines = []
    for table in ("parallel", "train"):
        lines.append(f"[{table}]")
        for key, value in keys(ran).items():
            if key.startswith(f"{table}."):
                lines.append(f"{key.removeprefix(f'{table}.')} = {toml(value)}")
    return "\n".join(lines)
