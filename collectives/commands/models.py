"""The commands that put the cost models into tables: ``simulate``, ``cost`` and ``fit``."""

import argparse
from math import log2
from pathlib import Path

from collectives.algorithms import REGISTRY, build, find, names, own, parse
from collectives.analysis.claims import prove_claims
from collectives.analysis.fit import LEFT_OUT, MEMORIES, fit, read
from collectives.analysis.formulas import FORMULAS
from collectives.analysis.pictures import expect_picture, pyplot
from collectives.analysis.simulate import Machine, simulate
from collectives.commands.arguments import (
    above_zero,
    add_bytes,
    add_collective,
    add_network,
    add_ranks,
    in_words,
    known,
    network,
)
from collectives.commands.program import Commands
from collectives.commands.schedules import MOST_PROVED
from collectives.compile.cost import Model
from collectives.errors import TooLarge, UnknownAlgorithm


def add(commands: Commands) -> None:
    """Adds ``simulate``, ``cost`` and ``fit``."""
    timing = commands.add_parser("simulate", help="simulate algorithms on a modelled network")
    add = timing.add_argument
    add_collective(timing, "allreduce")
    add_ranks(timing, "8..65536")
    add_bytes(timing, "64M")
    add("--ports", choices=("one", "multi"), default="one", help="ports of a rank (one)")
    which = "names with options, mine.py:name, or all (all)"
    add("--algorithm", default="all", metavar="A,B", help=which)
    add_network(timing)
    add("--plot", type=Path, help="write a PNG")
    timing.set_defaults(run=simulate_sizes)

    pricing = commands.add_parser("cost", help="compare formulas of costs with the simulator")
    add = pricing.add_argument
    add_collective(pricing, "allreduce")
    add_ranks(pricing, 8)
    add_bytes(pricing, "1M")
    add_network(pricing)
    add("--reduction", type=above_zero, default=100.0, help="speed of a reduction in GB/s (100)")
    beside = "algorithms to simulate beside these: names with options, or mine.py:name"
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
    wanted = known(options.algorithm, names(options.collective))
    if not wanted:
        raise UnknownAlgorithm("--algorithm names none; give names, or all")
    what = f"{options.collective} of {options.bytes} bytes"
    title = f"{what}, {in_words(options)}, {options.ports}-port"
    print(f"{title}; milliseconds")
    widths = {name: 2 + max(8, len(name)) for name in wanted}
    print("  ranks" + "".join(f"{name:>{width}}" for name, width in widths.items()))
    table: dict[str, list[tuple[int, float]]] = {name: [] for name in wanted}
    for count in options.ranks:
        machine = Machine(network(options, count), ports=options.ports)
        line = f"{count:>7}"
        for name, registered in wanted.items():
            seconds = _simulated(options, registered, count, machine)
            if seconds is not None:
                table[name].append((count, seconds))
            line += f"{'-' if seconds is None else f'{1e3 * seconds:.3f}':>{widths[name]}}"
        times = {name: rows[-1][1] for name, rows in table.items() if rows and rows[-1][0] == count}
        print(f"{line}  {min(times, key=times.__getitem__) if times else ''}", flush=True)
    tree = next((name for name in wanted if "tree" in name or name == "chain"), "")
    if tree and not any("segments" in name for name in wanted):
        print(
            "whole buffers go from rank to rank; only segments fill the links of trees and chains, "
            f"as in --algorithm {tree}{',' if ':' in tree else ':'}segments=16"
        )
    for told in _unproved(options.collective, wanted, max(options.ranks)):
        print(told)
    if options.plot:
        _picture(table, title, options.plot)
        print(f"wrote {options.plot}")
    return 0


def _simulated(options: argparse.Namespace, name: str, size: int, machine: Machine) -> float | None:
    """Seconds of an algorithm on ``size`` ranks, if it is one for so many.

    Raises:
        ScheduleError: it is a program's own, and wrong.
    """
    base, given = parse(name)
    given.pop("segments", None)
    algorithm = find(options.collective, base)
    try:
        plain = REGISTRY.schedule(options.collective, base, size, 0, **given)
        if size <= MOST_PROVED and own(options.collective, name):
            prove_claims(algorithm, plain)  # segments repeat its rounds
        schedule = build(options.collective, name, size, proved=plain)
        return simulate(schedule, options.bytes, machine, algorithm.uniform and ":" not in name)
    except (TooLarge, UnknownAlgorithm):
        return None


def _unproved(which: str, wanted: dict[str, str], most: int) -> list[str]:
    """A line for people if a program's own algorithms are simulated where nothing proves them."""
    ours = [name for name, registered in wanted.items() if own(which, registered)]
    told = f"{', '.join(ours)}: not proved on more than {MOST_PROVED} ranks; 'verify' does it"
    return [told] if ours and most > MOST_PROVED else []


def _picture(table: dict[str, list[tuple[int, float]]], title: str, path: Path) -> None:
    """Simulated seconds against ranks, a curve for each algorithm; on one number of ranks, bars."""
    plt = pyplot()
    canvas, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    rows = {name: points for name, points in table.items() if points}
    if max(map(len, rows.values()), default=0) > 1:
        for name, points in rows.items():
            ranks, seconds = zip(*points)
            axes.plot(ranks, [1e3 * s for s in seconds], marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        axes.set_ylabel("simulated time (ms)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    else:
        for name in sorted(rows, key=lambda name: rows[name], reverse=True):  # the fastest on top
            count, second = rows[name][0]
            bar = axes.barh(name, 1e3 * second, color="C0")
            axes.bar_label(bar, fmt="%.3g", padding=3)
            axes.set_xlabel(f"simulated time on {count} ranks (ms)")
        axes.margins(x=0.1)
    axes.set_title(title, fontsize=10)
    canvas.savefig(path, dpi=110)
    plt.close(canvas)


def cost(options: argparse.Namespace) -> int:
    """Prints each algorithm's time by closed form, by the simulator, and by a textbook."""
    model = Model(1e-6 * options.alpha, 1e-9 / options.bandwidth, 1e-9 / options.reduction)
    which, p, m = options.collective, options.ranks, options.bytes
    machine = Machine(network(options, p), model.gamma)
    print(f"{which} of {m} bytes on {p} ranks, {in_words(options)}, one-port; microseconds")
    closed = {one.algorithm: one for one in FORMULAS if which == "allreduce"}
    wanted = known(f"all,{options.algorithm}", closed or names(which))
    width = max(20, *(2 + len(name) for name in wanted))
    print(f"{'algorithm':<{width}}{'formula':>11}{'simulated':>11}{'textbook':>11}  formula (flat)")
    notes = ['textbook: A. Rodriguez, "Deep Learning Systems", 2020'] if closed else []
    for name, registered in wanted.items():
        seconds = _simulated(options, registered, p, machine)
        simulated = "-" if seconds is None else f"{1e6 * seconds:.1f}"
        formula = closed.get(name)
        if formula is None:
            print(f"{name:<{width}}{'-':>11}{simulated:>11}{'-':>11}  no closed form")
            continue
        holds = not formula.powers_only or log2(p).is_integer()
        ours = f"{1e6 * formula.seconds(model, m, p):.1f}" if holds else "-"
        textbook = formula.book_seconds
        book = f"{1e6 * textbook(model, m, p):.1f}" if textbook else "-"
        told = formula.text + (f"; textbook: {formula.book}" if formula.book else "")
        print(f"{name:<{width}}{ours:>11}{simulated:>11}{book:>11}  {told}")
        if formula.difference:
            notes.append(f"{name}: {formula.difference}")
    print("\n".join(["", *notes, *_unproved(which, wanted, p)]))
    return 0


def fit_files(options: argparse.Namespace) -> int:
    """Prints the fitted parameters of a machine, and measured beside predicted times."""
    samples, left_out = read(options.files, options.memory)
    fits = fit(samples)
    if left_out:
        print(f"left out: {left_out} rows {LEFT_OUT}")
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
