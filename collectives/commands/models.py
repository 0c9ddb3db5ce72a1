"""The commands that put the cost models into tables: ``simulate``, ``cost`` and ``fit``."""

import argparse
from math import log2
from pathlib import Path

from collectives.algorithms import build, find, names, parse
from collectives.analysis.fit import MEMORIES, fit, read
from collectives.analysis.formulas import FORMULAS
from collectives.analysis.pictures import expect_picture, pyplot
from collectives.analysis.simulate import Machine, simulate
from collectives.analysis.topology import LinkCost, Topology
from collectives.commands.arguments import (
    RANKS,
    TOPOLOGIES,
    above_zero,
    add_network,
    known,
    network,
    rank_count,
    ranks,
    size,
)
from collectives.commands.program import Commands
from collectives.compile.cost import Model
from collectives.contracts import CONTRACTS
from collectives.errors import CollectiveError, TooLarge, UnknownAlgorithm


def add(commands: Commands) -> None:
    """Adds ``simulate``, ``cost`` and ``fit``."""
    timing = commands.add_parser(
        "simulate", help="simulate algorithms on a model of a network: which one wins"
    )
    add = timing.add_argument
    add(
        "collective",
        nargs="?",
        choices=CONTRACTS,
        default="allreduce",
        metavar="collective",
        help=f"{', '.join(CONTRACTS)} (allreduce)",
    )
    on = f"numbers of ranks: {RANKS} (8..65536)"
    add("--ranks", type=ranks, default=ranks("8..65536"), help=on)
    where = "network (fat-tree); flat is the one switch of 'cost'"
    add("--topology", choices=TOPOLOGIES, default="fat-tree", help=where)
    add("--size", type=size, default=64 << 20, help="bytes of the buffer (64M)")
    add("--ports", choices=("one", "multi"), default="one", help="ports of a rank (one)")
    which = "names with options, mine.py:name, or all (all)"
    add("--algorithm", default="all", metavar="A,B", help=which)
    add_network(timing)
    add("--plot", type=Path, help="write a PNG")
    timing.set_defaults(run=simulate_sizes)

    pricing = commands.add_parser(
        "cost", help="compare formulas for costs of all-reduces with the simulator"
    )
    add = pricing.add_argument
    add("-n", "--ranks", type=rank_count, default=8, help="number of ranks (8)")
    add("--size", type=size, default=1 << 20, help="bytes of the buffer (1M)")
    add_network(pricing)
    add("--reduction", type=above_zero, default=100.0, help="speed of a reduction in GB/s (100)")
    beside = "all-reduces of your own beside these, as mine.py:name: by the simulator"
    add("--algorithm", default="", metavar="A,B", help=beside)
    pricing.set_defaults(run=cost)

    fitting = commands.add_parser(
        "fit", help="fit alpha, beta and gamma to files of 'bench -J', and show the errors"
    )
    add = fitting.add_argument
    add("files", nargs="+", type=Path, metavar="JSON", help="file of 'bench -J'")
    rows = "rows to read: of ordinary memory, or of shared memory (numpy)"
    add("--memory", choices=MEMORIES, default="numpy", help=rows)
    fitting.set_defaults(run=fit_files)


def simulate_sizes(options: argparse.Namespace) -> int:
    """Prints simulated times and the fastest algorithm for each number of ranks."""
    if options.plot:
        expect_picture(options.plot)  # refused now rather than when all is simulated
        pyplot()
        if len(options.ranks) == 1:
            raise CollectiveError("--plot draws curves over numbers of ranks; give --ranks 8..1024")
    wanted = names(options.collective) if options.algorithm == "all" else known(options.algorithm)
    if not wanted:
        raise UnknownAlgorithm("--algorithm names none; give names, or all")
    title = (
        f"{options.collective} of {options.size} bytes, {options.topology}, {options.ports}-port"
    )
    beside = " (collectives cost: --topology flat)" * (options.collective == "allreduce")
    print(f"{title}, milliseconds{beside}")
    widths = {name: 2 + max(8, len(name)) for name in wanted}
    print("  ranks" + "".join(f"{name:>{width}}" for name, width in widths.items()))
    table: dict[str, list[tuple[int, float]]] = {name: [] for name in wanted}
    for count in options.ranks:
        machine = Machine(network(options, count), ports=options.ports)
        line = f"{count:>7}"
        for name in wanted:
            uniform = find(options.collective, parse(name)[0]).uniform
            try:
                schedule = build(options.collective, name, count)
                seconds = simulate(schedule, options.size, machine, uniform)
            except (TooLarge, UnknownAlgorithm):  # not at this size
                line += f"{'-':>{widths[name]}}"
                continue
            table[name].append((count, seconds))
            line += f"{1e3 * seconds:>{widths[name]}.3f}"
        times = {name: rows[-1][1] for name, rows in table.items() if rows and rows[-1][0] == count}
        print(f"{line}  {min(times, key=times.__getitem__) if times else ''}", flush=True)
    tree = next((name for name in wanted if "tree" in name or name == "chain"), "")
    if tree and not any("segments" in name for name in wanted):
        print(
            "whole buffers go from rank to rank; only segments fill the links of trees and chains, "
            f"as in --algorithm {tree}:segments=16"
        )
    if options.plot:
        _curves(table, title, options.plot)
        print(f"wrote {options.plot}")
    return 0


def _curves(table: dict[str, list[tuple[int, float]]], title: str, path: Path) -> None:
    """Simulated seconds against ranks, one curve for each algorithm."""
    plt = pyplot()
    canvas, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, points in table.items():
        if points:
            ranks, seconds = zip(*points)
            axes.plot(ranks, [1e3 * s for s in seconds], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_ylabel("simulated time (ms)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def cost(options: argparse.Namespace) -> int:
    """Prints each all-reduce's time by closed form, by the simulator, and by a textbook."""
    model = Model(1e-6 * options.alpha, 1e-9 / options.bandwidth, 1e-9 / options.reduction)
    machine = Machine(Topology(LinkCost(model.alpha, model.beta)), model.gamma)
    p, m = options.ranks, options.size
    switch = "one switch (simulate: --topology flat)"
    print(f"all-reduce of {m} bytes on {p} ranks of {switch}, one port each, microseconds")
    print(f"{'algorithm':<20}{'formula':>11}{'simulated':>11}{'textbook':>11}  formula")
    notes = ['textbook: A. Rodriguez, "Deep Learning Systems", 2020']
    for formula in FORMULAS:
        holds = not formula.powers_only or log2(p).is_integer()
        ours = f"{1e6 * formula.seconds(model, m, p):.1f}" if holds else "-"
        seconds = simulate(build("allreduce", formula.algorithm, p), m, machine)
        textbook = formula.book_seconds
        book = f"{1e6 * textbook(model, m, p):.1f}" if textbook else "-"
        print(
            f"{formula.algorithm:<20}{ours:>11}{1e6 * seconds:>11.1f}{book:>11}  {formula.text}"
            + (f"; textbook: {formula.book}" if formula.book else "")
        )
        if formula.difference:
            notes.append(f"{formula.algorithm}: {formula.difference}")
    for name in known(options.algorithm):
        seconds = simulate(build("allreduce", name, p), m, machine)
        print(f"{name:<20}{'-':>11}{1e6 * seconds:>11.1f}{'-':>11}  no closed form")
    print("\n".join(["", *notes]))
    return 0


def fit_files(options: argparse.Namespace) -> int:
    """Prints the fitted parameters of a machine, and measured beside predicted times."""
    samples = read(options.files, options.memory)
    fits = fit(samples)
    for found in fits:
        alpha, beta, gamma = found.model
        print(
            f"{found.least} to {found.most} bytes: alpha {1e6 * alpha:.2f} us, 1/beta "
            f"{_rate(beta)}, 1/gamma {_rate(gamma)}; error: median "
            f"{100 * found.median_error:.0f}%, largest {100 * found.errors.max():.0f}%"
        )
    if max(found.median_error for found in fits) > 0.25:
        print("a straight line in alpha and beta explains this machine badly: caches, or noise")
    print(f"{'algorithm':<28}{'bytes':>11}{'measured':>12}{'predicted':>12}{'error':>8}   (us)")
    for sample in samples:
        found = next(f for f in fits if f.least <= sample.nbytes <= f.most)
        seconds = sample.predicted(found.model)
        error = 100 * (seconds / sample.seconds - 1)
        print(
            f"{sample.algorithm:<28}{sample.nbytes:>11}{1e6 * sample.seconds:>12.2f}"
            f"{1e6 * seconds:>12.2f}{error:>7.0f}%"
        )
    return 0


def _rate(seconds: float) -> str:
    return f"{1e-9 / seconds:.1f} GB/s" if seconds else "not seen"
