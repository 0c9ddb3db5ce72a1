"""Several files of ``bench -J`` (of different MPIs, clusters, days) as one Markdown table.

python -m benchmarks.compare runs/*.json
python -m benchmarks.compare --peers runs/?/allreduce_*.json      # medians of several runs
python -m benchmarks.compare --auto runs/?/*.json
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace

from benchmarks import auto, program
from benchmarks.words import bytes_in_words
from collectives.analysis.pictures import expect_picture, pyplot
from collectives.analysis.records import Measured, Record, read
from collectives.errors import CollectiveError


def table(paths: list[Path]) -> str:
    """Native's time in microseconds, and how many times faster each row of ours was.

    Native's is the best of its times over all kinds of memory, so that no row of ours gains from a
    memory on which native is slow.

    Raises:
        CollectiveError: for a file that is no benchmark's.
    """
    files = [*_alike(paths).values()]
    heads, columns = ["bytes"], []
    for told in files:
        times = {(r.memory, r.algorithm, r.bytes): r.p50_us for r in _rows(told)}
        series = list(dict.fromkeys((memory, algorithm) for memory, algorithm, _ in times))
        heads.append(f"{told.environment}: native (us)")
        columns.append((times, "", "native"))
        for memory, algorithm in series:
            if algorithm != "native":
                heads.append(f"{algorithm}{'' if memory == 'numpy' else f', {memory}'}")
                columns.append((times, memory, algorithm))
    lines = [_line(heads), _line(["---:"] * len(heads))]
    for size in sorted({r.bytes for told in files for r in _rows(told)}):
        lines.append(_line([bytes_in_words(size), *(_cell(*column, size) for column in columns)]))
    return "\n".join(lines)


def _alike(paths: Sequence[Path]) -> dict[Path, Measured]:
    """The files, which are of one collective on one number of ranks; Gloo's do not say how many."""
    every = {path: read(path) for path in paths}
    files = [*every.values()]
    measured = {r.collective for told in files for r in told.results}
    ranks = {r.ranks for told in files for r in told.results if r.ranks}
    if len(measured) > 1 or len(ranks) > 1:
        numbers = ", ".join(map(str, sorted(ranks)))
        raise CollectiveError(
            f"these files are of {', '.join(sorted(measured))} on {numbers} ranks; compare one "
            "collective on one number of ranks"
        )
    return every


def _libraries(paths: Sequence[Path]) -> dict[Path, Measured]:
    """One file for each library: the first of its runs on this machine, with their median times.

    Raises:
        CollectiveError: the runs have not measured the same.
    """
    runs: dict[str, dict[Path, Measured]] = {}
    for path, told in _alike(paths).items():
        runs.setdefault(str(told.environment), {})[path] = told
    for name, own in runs.items():
        if len({frozenset(map(_case, told.results)) for told in own.values()}) > 1:
            raise CollectiveError(f"runs of {name} differ in what they have measured: repeat them")
    return {next(iter(own)): _median_run([*own.values()]) for own in runs.values()}


def _median_run(runs: Sequence[Measured]) -> Measured:
    """Rows of the first run, each with the median of its times in all of them."""
    times: dict[Any, list[float]] = {}
    for row in (row for told in runs for row in told.results):
        times.setdefault(_case(row), []).append(row.p50_us)
    rows = [replace(row, p50_us=median(times[_case(row)])) for row in runs[0].results]
    stores = [ns for told in runs for ns in told.environment.store_ns or ()]
    span = [min(stores), max(stores)] if stores else None
    return Measured(replace(runs[0].environment, store_ns=span), rows)


def _case(row: Record) -> tuple[str, str, int, bool]:
    return row.memory, row.algorithm, row.bytes, row.in_place


def _cell(times: dict[Any, float], memory: str, algorithm: str, size: int) -> str:
    natives = [us for (_, name, n), us in times.items() if (name, n) == ("native", size)]
    native = min(natives, default=None)
    time = native if algorithm == "native" else times.get((memory, algorithm, size))
    if time is None:
        return "-"
    if algorithm == "native" or native is None:
        return f"{time:.1f}"
    return f"{native / time:.2f}x"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def peers(paths: list[Path]) -> str:
    """One collective: the library's own by several MPIs (and Gloo), and ``auto`` beside each.

    A machine's speed changes from run to run, so a library is compared with ``auto`` in the same
    run: ``x`` is its time, on the memory where it is fastest, over that of ``auto`` on ordinary
    arrays.  Several files of a library are its runs, whose median times count.  Gloo, which has no
    run with ours, is compared with our slowest run.  ``auto`` is the median library's time, with
    the least and the median ``x`` over the libraries; ``comm.empty`` has the three numbers of its
    arrays.  ``auto/native`` is the least ratio on the same memory, where ``auto`` took ours.

    Raises:
        CollectiveError: for a file that is no benchmark's, or has no row of native's or of
            ``auto`` where one of ours is to be compared with it; for files without a size in
            common, or without a row of ours.
    """
    measured = _libraries(paths)
    files, rows = [*measured.values()], [_rows(told) for told in measured.values()]
    common = set.intersection(*({r.bytes for r in records} for records in rows))
    if not common:
        raise CollectiveError("the files have no size in common: measure the same sizes")
    heads = ["bytes", *(f"{told.environment} (x)" for told in files)]
    heads += ["auto", "least x", "median x", "comm.empty", "least x", "median x", "auto/native"]
    lines = [_line(heads), _line(["---:"] * len(heads))]
    for size in sorted(common):
        runs = [Run(path, records, size) for path, records in zip(measured, rows)]
        if not any(run.autos for run in runs):
            raise CollectiveError("none of the files has a row of ours: bench --algorithm auto")
        ratios = [f" ({x:.2f})" for x in _ratios(runs, "numpy")] or [""] * len(runs)
        beside = [f"{run.native:.1f}{x}" for run, x in zip(runs, ratios)]
        own = [ratio for run in runs for ratio in run.auto_to_native]
        ours = [*_summary(runs, "numpy"), *_summary(runs, "shared")]
        ours.append(f"{min(own):.2f}" if own else "native")
        lines.append(_line([bytes_in_words(size), *beside, *ours]))
    stores = [ns for told in files for ns in (told.environment.store_ns or ())[1:]]
    if stores:
        span = f"{min(stores):.1f} to {max(stores):.1f} ns"
        lines += ["", f"A store to a line that the other core has read since took {span}."]
    return "\n".join(lines)


def _ratios(runs: "Sequence[Run]", memory: str) -> list[float]:
    """Each library's time over that of ``auto`` on a kind of memory; none if no run has it."""
    slowest = max((run.autos[memory] for run in runs if memory in run.autos), default=None)
    return [run.native / run.autos.get(memory, slowest) for run in runs] if slowest else []


def _summary(runs: "Sequence[Run]", memory: str) -> list[str]:
    """Time of ``auto`` on a kind of memory, and the least and the median of its ratios."""
    ratios = _ratios(runs, memory)
    if not ratios:
        return ["-", "-", "-"]
    own = median(run.autos[memory] for run in runs if memory in run.autos)
    return [f"{own:.1f}", f"{min(ratios):.2f}", f"{median(ratios):.2f}"]


#: Kinds of memory and how their lines are drawn.
_LINES = {"numpy": ("-", "o"), "shared": ("--", "s")}


def plot(path: Path, files: list[Path]) -> None:
    """Against size, each library's time over that of ``auto`` in the same run: solid lines are
    ordinary arrays, dashed ones those of ``Communicator.empty``.  Files without ``auto``, as
    Gloo's, have no line.

    Raises:
        CollectiveError: for a file that is no benchmark's, or if none has ``auto``.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
    told = [
        (name, one)
        for name, one in _libraries(files).items()
        if any(r.algorithm == "auto" for r in one.results)
    ]
    if not told:
        raise CollectiveError("none of the files has a row of auto: bench --algorithm all,auto")
    for number, (name, one) in enumerate(told):
        rows = _rows(one)
        runs = {size: Run(name, rows, size) for size in sorted({r.bytes for r in rows})}
        for memory, (line, marker) in _LINES.items():
            known = {
                size: r.native / r.autos[memory] for size, r in runs.items() if memory in r.autos
            }
            label = f"{one.environment}" if memory == "numpy" else None
            style = {"linestyle": line, "marker": marker, "color": f"C{number}", "markersize": 4}
            axes.plot(known.keys(), known.values(), label=label, **style)
    axes.axhline(1, color="0.6", linewidth=5, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    axes.set_xlabel("bytes")
    first = told[0][1].results[0]
    axes.set_title(
        f"{first.collective} of {max(r.ranks for r in told[0][1].results)} ranks: the library's "
        "time / auto's\nsolid: ordinary arrays, dashed: comm.empty",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _rows(told: Measured) -> list[Record]:
    """Records out of place, or those in place of a file that has no others."""
    return [r for r in told.results if not r.in_place] or told.results


class Run:
    """Results of one run at one size.

    Attributes:
        native: the library's time, on the memory where it is fastest.
        autos: times of ``auto``, by the kind of memory.
        auto_to_native: for each kind of memory where ``auto`` took one of ours, the library's time
            over its own.

    Raises:
        CollectiveError: ours cannot be compared, as native's row or that of ``auto`` is missing.
    """

    def __init__(self, path: Path, records: list[Record], size: int) -> None:
        here = [r for r in records if r.bytes == size]
        native = {r.memory: r.p50_us for r in here if r.algorithm == "native"}
        autos = [r for r in here if r.algorithm == "auto"]
        bare = sorted({r.memory for r in autos} - native.keys())
        words = bytes_in_words(size)
        if not native or bare:
            where = f"on {bare[0]} memory " if bare else ""
            raise CollectiveError(
                f"{path} has no row of native {where}for {words}, which ours are compared with"
            )
        if not autos and any(r.algorithm != "native" for r in here):
            raise CollectiveError(
                f"{path} has no row of auto for {words}: bench --algorithm all,auto"
            )
        self.native = min(native.values())
        self.autos = {r.memory: r.p50_us for r in autos}
        self.auto_to_native = [native[r.memory] / r.p50_us for r in autos if r.ran != "native"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; draws a picture with ``--plot``."""
    parser = argparse.ArgumentParser(prog="benchmarks.compare", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="JSON", help="file of 'bench -J'")
    against = parser.add_mutually_exclusive_group()
    each = "compare ours with each MPI library's own, one file for each MPI, or one for each run"
    against.add_argument("--peers", action="store_true", help=each)
    slower = (
        "compare auto with the library's own on the same memory, over the files of several runs, "
        "and name where it is slower"
    )
    against.add_argument("--auto", action="store_true", help=slower)
    drawn = "draw how many times as fast auto is as each library, on every kind of memory"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=drawn)

    def act(options: argparse.Namespace) -> int:
        if options.plot:
            expect_picture(options.plot)
            plot(options.plot, options.files)
        show = peers if options.peers else auto.report if options.auto else table
        print(show(options.files))
        return 0

    return program.run(parser, arguments, act)


if __name__ == "__main__":
    sys.exit(main())
