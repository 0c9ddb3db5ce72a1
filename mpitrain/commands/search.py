"""``mpitrain search``: the fastest layouts of a job, found before anything runs."""

import argparse
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from collectives.analysis.topology import NETWORK, NODE, LinkCost
from collectives.commands.arguments import above_zero, positive
from mpitrain.config import Config, ConfigError, expect, load
from mpitrain.config.numbers import toml

if TYPE_CHECKING:
    from collectives.commands.arguments import Commands
    from mpitrain.data.dataset import Dataset
    from mpitrain.search.layers import LayerCost
    from mpitrain.search.layouts import Found, Search
    from mpitrain.search.stages import Candidate


def add(commands: "Commands") -> None:
    """Adds the command."""
    from mpitrain.commands.offline import add_job

    parser = commands.add_parser(
        "search", help="find the fastest layouts of a job: data, pipe, tensor, ZeRO, micro-batches"
    )
    add_job(parser)
    add = parser.add_argument
    add("-n", "--ranks", type=positive, required=True, help="number of ranks")
    add("--nodes", type=positive, default=1, help="nodes, each with equally many ranks (1)")
    rate = (
        "matrix-product operations that a rank does in a second, as 1e14; the costs of layers then "
        "come from their shapes alone. Without it, each layer is timed on this machine"
    )
    add("--flops", type=above_zero, help=rate)
    add("--memory", type=above_zero, metavar="GIB", help="GiB that a rank may use (no limit)")
    link = "latency in microseconds and GB/s between"
    add("--inside", type=_link, default=NODE, help=f"{link} ranks of a node (0.5,150)")
    add("--network", type=_link, default=NETWORK, help=f"{link} nodes, as fit prints (1.5,25)")
    add("--adapters", type=positive, default=1, help="network ports of a node (1)")
    add("--top", type=positive, default=10, help="layouts to show (10)")
    add("-o", "--output", type=Path, help="file for the tables of the first layout, as TOML")
    parser.set_defaults(act=run)


def run(options: argparse.Namespace) -> None:
    """Print the fastest layouts, what was refused, and the tables of the first one."""
    config = load(options.config, options.set)
    search = _search(config, options)
    found = search.fastest(options.top, list(_allowed(config, search)))
    refused = [f"refused: {count} with {why}" for why, count in search.refused.most_common()]
    if not found:
        raise ConfigError("no layout fits; " + "; ".join(refused))
    print("\n".join([*_table(found, search.batch), *refused]))
    tables = _tables(found[0])
    print(f"\n{tables}")
    if options.output:
        options.output.write_text(tables + "\n", encoding="utf-8")


def _link(text: str) -> LinkCost:
    """A link from ``microseconds,GB/s``."""
    try:
        alpha, rate = (float(part) for part in text.split(","))
        if not (0 <= alpha < np.inf and 0 < rate < np.inf):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no latency,rate as in 1.5,25") from None
    return LinkCost(alpha * 1e-6, 1e-9 / rate)


def _search(config: Config, options: argparse.Namespace) -> "Search":
    from mpitrain.search.layouts import Search
    from mpitrain.search.machine import Machine
    from mpitrain.search.stages import Numerics
    from mpitrain.step.precision import compute_type
    from mpitrain.training import build

    expect(config, "described", command="mpitrain search")
    if options.ranks % options.nodes:
        raise ConfigError(f"--nodes {options.nodes}: does not divide the {options.ranks} ranks")
    machine = Machine(
        options.ranks,
        options.ranks // options.nodes,
        options.flops or 1.0,
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


def _allowed(config: Config, search: "Search") -> "list[Candidate]":
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
    for ran in found:
        cut = "-".join(map(str, ran.cut.sizes))
        pipe = f", layers {cut}, {ran.schedule}" if ran.layout.pipe > 1 else ""
        lines.append(
            f"{1e3 * ran.seconds:12.2f} {batch / ran.seconds:10.0f} {ran.busy:10.1%} "
            f"{ran.memory / 2**30:11.3g}  {ran.layout}{pipe}"
        )
    return lines


def _tables(best: "Found") -> str:
    """The tables of a layout, as a job file has them."""
    layout = best.layout
    keys: dict[str, object] = {
        "pipe": layout.pipe,
        "tensor": layout.tensor,
        "sequence": layout.sequence,
        "data": layout.data,
        "zero": layout.zero,
        "recompute": layout.recompute,
    }
    if layout.pipe > 1:
        keys |= {"partition": best.cut.sizes, "schedule": best.schedule}
    lines = [f"{key} = {toml(value)}" for key, value in keys.items()]
    return "\n".join(
        ["[parallel]", *lines, "", "[train]", f"micro_batches = {layout.micro_batches}"]
    )
