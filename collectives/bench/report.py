"""A benchmark's results as a table, JSON, CSV and a plot."""

import csv
import io
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.about import program, provenance
from collectives.analysis.pictures import pyplot
from collectives.bench.measure import Result
from collectives.bench.stores import store_ns
from collectives.calls.native import THREAD_LEVELS
from collectives.errors import CollectiveError
from collectives.files import replace

#: Relative distance of quartiles from the median that is marked as noise.
NOISY = 0.2


def environment(comm: MPI.Intracomm) -> dict[str, Any]:
    """Software and machine of the measurement.  Collective."""
    hosts = comm.allgather(MPI.Get_processor_name())
    return {
        **provenance(),
        "threads": THREAD_LEVELS[MPI.Query_thread()],
        "ranks": comm.size,
        "nodes": len(set(hosts)),
        "hosts": sorted(set(hosts)),
        "cores": os.cpu_count(),
        "processor": processor(),
        "store_ns": store_ns(comm),
    }


def processor() -> str:
    """Model of the processor, where Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())


def beyond_caches() -> int:
    """Bytes that displace each other from all caches."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        last_level = int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        last_level = 0
    return max(4 * last_level, 256 << 20)


def header(about: dict[str, Any], command: str) -> str:
    """Lines above the table."""
    gpu = f", {about['gpu']}" if "gpu" in about else ""
    hosts = ", ".join(about["hosts"][:4]) + (", ..." if about["nodes"] > 4 else "")
    stores = about["store_ns"]
    state = stores and f"{stores[0]:.1f} ns; {stores[1]:.1f} where another core has read its line"
    return (
        f"# mpitrain {about['mpitrain']}, {about['mpi']}, threads {about['threads']}; mpi4py "
        f"{about['mpi4py']}, NumPy {about['numpy']}, Python {about['python']}\n"
        f"# {about['ranks']} ranks on {about['nodes']} node(s): {hosts}; "
        f"{about['cores']} cores of {about['processor']}{gpu}\n"
        f"# {about['date']}{f'; a store takes {state}' if state else ''}\n"
        f"# {command}\n"
        "# time: median over repeats, by default of the slowest rank; bandwidths in GB/s\n"
        "# +-%: how far the quartiles of the repeats lie from the median; ! marks more than "
        f"{NOISY:.0%}\n"
        "# ratio: native's time on the same buffers over ours\n"
        "# floor%: with --floor, the time that the least memory traffic takes, over ours\n"
        "# peak%: with --peak, the bus bandwidth over that of the link"
    )


def columns(width: int = 26, peak: float | None = None) -> str:
    """Head of the table; ``width``: width of the algorithms' names; ``peak``: value of --peak."""
    return (
        f"{'size(B)':>11} {'count':>10} {'type':>9} {'redop':>6} {'memory':>8} {'place':>5}  "
        f"{'algorithm':<{width}}{'time(us)':>11} {'+-%':>5} {'algbw':>8} {'busbw':>8} {'ratio':>7} "
        f"{'floor%':>7} {'overlap%':>8} {'#wrong':>7}{' peak%' if peak else ''}"
    )


def row(result: Result, native: Result | None, width: int = 26, peak: float | None = None) -> str:
    """One line of the table."""
    ratio = f"{native.time_us / result.time_us:.2f}" if native else "-"
    floor = f"{100 * result.floor_us / result.time_us:.0f}" if result.floor_us else "-"
    overlap = "-" if result.overlap is None else f"{result.overlap:.0f}"
    wrong = "N/A" if result.wrong is None else str(result.wrong)
    return (
        f"{result.bytes:>11} {result.count:>10} {result.dtype:>9} {result.op:>6} "
        f"{result.memory:>8} {'in' if result.in_place else 'out':>5}  {result.algorithm:<{width}}"
        f"{result.time_us:>11.2f} {_spread(result)} {result.algbw:>8.2f} {result.busbw:>8.2f} "
        f"{ratio:>7} {floor:>7} {overlap:>8} {wrong:>7}"
        f"{f' {100 * result.busbw / peak:>5.1f}' if peak else ''}"
    )


def _spread(result: Result) -> str:
    if result.spread is None:
        return "   - "
    percent = f"{100 * result.spread:.0f}" if result.spread < 10 else ">999"
    return f"{percent:>4}{'!' if result.spread > NOISY else ' '}"


def expect_some(results: list[Result]) -> None:
    """Raises :class:`CollectiveError` if nothing was measured."""
    if not results:
        raise CollectiveError(
            "nothing was measured: no algorithm runs this type in this place; name another "
            "--datatype, --algorithm or --place"
        )


def footer(results: list[Result], least: float = 0) -> str:
    """nccl-tests' last lines; ``least``: value of ``--min-busbw``.

    Each algorithm has a line for each memory, as a mean of bus bandwidths over sizes compares only
    runs of these.

    Raises:
        CollectiveError: there are no results.
    """
    expect_some(results)
    wrong = sum(result.wrong or 0 for result in results)
    lines = [f"# Out of bounds values : {wrong} {'OK' if not wrong else 'FAILED'}"]
    series = by_series(results)
    ours = [name for name in series if name[0] != "native"]
    if len(ours or series) == 1:
        lines.append(f"# Avg bus bandwidth    : {average_busbw(results):.4f}")
    else:
        lines.append("# Avg bus bandwidth of each algorithm and memory, GB/s")
        width = max(len(algorithm) for algorithm, _ in series)
        lines += [
            f"#   {algorithm:<{width}}  {memory:<6} : {average(mine):.4f}"
            for (algorithm, memory), mine in series.items()
        ]
    if least:
        lines.append(
            f"# Mean of all rows that --min-busbw judges: {average_busbw(results):.4f}, at least "
            f"{least:g} asked for"
        )
    noisy = sum(1 for result in results if (result.spread or 0) > NOISY)
    if noisy:
        lines.append(
            f"# {noisy} of {len(results)} rows are noisy (!): use more --repeats or a quieter "
            "machine before comparing them"
        )
    return "\n".join(lines)


def by_series(results: list[Result]) -> dict[tuple[str, str], list[Result]]:
    """Results by (algorithm, memory), in their order."""
    series: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        series.setdefault((result.algorithm, result.memory), []).append(result)
    return series


def average(results: list[Result]) -> float:
    """Mean bus bandwidth in GB/s; 0 without results."""
    return float(np.mean([result.busbw for result in results])) if results else 0.0


def average_busbw(results: list[Result]) -> float:
    """Mean over all rows of ours, or of native's without these, in GB/s; see ``--min-busbw``."""
    return average([r for r in results if r.algorithm != "native"] or results)


def as_record(result: Result) -> dict[str, Any]:
    """A result with its derived numbers; quartiles are over the repeats."""
    p25, p50, p75 = np.percentile(result.times_us, [25, 50, 75]).tolist()
    derived = {"algbw_GBs": result.algbw, "busbw_GBs": result.busbw}
    return {**asdict(result), **derived, "p25_us": p25, "p50_us": p50, "p75_us": p75}


def unwritten(comm: MPI.Intracomm, write: Callable[[], None]) -> str:
    """Why rank 0 cannot write a file, on all ranks, or nothing; collective."""
    why = ""
    if comm.rank == 0:
        try:
            write()
        except OSError as error:
            why = f"cannot write {error.filename}: {error.strerror}"
        except CollectiveError as error:
            why = str(error)
    told: str = comm.bcast(why)
    return told


def write_json(
    path: Path, results: list[Result], about: dict[str, Any], config: dict[str, Any]
) -> None:
    """Writes all results with every single time."""
    records = [as_record(result) for result in results]
    content = {"version": 1, "config": config, "environment": about, "results": records}
    replace(path, json.dumps(content, indent=1) + "\n")


def write_csv(path: Path, results: list[Result]) -> None:
    """Writes a line a result, without the single times.

    Raises:
        CollectiveError: there are no results.
    """
    expect_some(results)
    lists = ("times_us", "ranks_us")
    records = [{k: v for k, v in as_record(r).items() if k not in lists} for r in results]
    text = io.StringIO()
    writer = csv.DictWriter(text, records[0])
    writer.writeheader()
    writer.writerows(records)
    replace(path, text.getvalue())


def plot(path: Path, results: list[Result], about: dict[str, Any]) -> None:
    """Draws latency and bus bandwidth against size, native as a thick grey line.

    Raises:
        CollectiveError: there are no results.
    """
    expect_some(results)
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    series: dict[str, list[Result]] = {}
    for r in results:
        place = " in place" if r.in_place else ""
        memory = "" if r.memory == "numpy" else f" ({r.memory})"
        series.setdefault(f"{r.algorithm}{memory}{place}", []).append(r)
    for name, mine in series.items():
        native = mine[0].algorithm == "native"
        style: dict[str, Any] = {"color": "0.6", "linewidth": 5} if native else {"marker": "o"}
        x = [r.bytes for r in mine]
        left.plot(x, [r.time_us for r in mine], label=name, zorder=1 if native else 2, **style)
        right.plot(x, [r.busbw for r in mine], label=name, zorder=1 if native else 2, **style)
    for axes, title in ((left, "time (us)"), (right, "bus bandwidth (GB/s)")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    left.set_yscale("log")
    right.legend(fontsize=8)
    figure.suptitle(
        f"{results[0].collective}, {about['ranks']} ranks on {about['nodes']} node(s), "
        f"{about['mpi']}, {about['processor']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def command_line() -> str:
    """The typed command, without the path of this package."""
    return shlex.join([*program("collectives").split(), *sys.argv[1:]])
