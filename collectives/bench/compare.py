"""Several benchmark files (of different MPIs, clusters, days) as one Markdown table."""

import json
from pathlib import Path
from typing import Any

from collectives.errors import CollectiveError


def table(paths: list[Path]) -> str:
    """Native's time in microseconds, and how many times faster each row of ours was.

    Native's is the best of its times over all kinds of memory, so that no row of ours gains from a
    memory on which native is slow.

    Raises:
        CollectiveError: for a file that is no benchmark's.
    """
    files = [_read(path) for path in paths]
    heads, columns = ["bytes"], []
    for told in files:
        about = told["environment"]
        label = f"{about['mpi']}, {about['threads']}"
        times = {
            (r["memory"], r["algorithm"], r["bytes"]): r["p50_us"]
            for r in told["results"]
            if not r["in_place"]
        }
        series = list(dict.fromkeys((memory, algorithm) for memory, algorithm, _ in times))
        heads.append(f"{label}: native (us)")
        columns.append((times, "", "native"))
        for memory, algorithm in series:
            if algorithm != "native":
                heads.append(f"{algorithm}{'' if memory == 'numpy' else f', {memory}'}")
                columns.append((times, memory, algorithm))
    lines = [_line(heads), _line(["---:"] * len(heads))]
    for size in sorted({r["bytes"] for told in files for r in told["results"]}):
        lines.append(_line([_bytes(size), *(_cell(*column, size) for column in columns)]))
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text())
        if {"results", "environment"} <= told.keys():
            return told
    except (OSError, ValueError, AttributeError) as error:
        raise CollectiveError(f"cannot read {path}: {error}") from None
    raise CollectiveError(f"{path} is not what 'bench -J' writes: it has no results")


def _cell(times: dict[Any, float], memory: str, algorithm: str, size: int) -> str:
    natives = [us for (_, name, n), us in times.items() if (name, n) == ("native", size)]
    native = min(natives, default=None)
    time = native if algorithm == "native" else times.get((memory, algorithm, size))
    if time is None:
        return "-"
    if algorithm == "native" or native is None:
        return f"{time:.1f}"
    return f"{native / time:.2f}x"


def _bytes(size: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power and size % (1 << power) == 0:
            return f"{size >> power} {unit}"
    return f"{size} B"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def peers(paths: list[Path]) -> str:
    """One collective: the library's own by several MPIs (and Gloo), and ours beside the fastest.

    ``best`` and ``auto`` are ours on the memory and MPI where they are fastest; ``x`` is the time
    of the fastest library over it.  ``auto/native`` is the least of its ratios to the library under
    the same MPI and on the same memory.  ``floor`` is the share of the least memory traffic's time.
    """
    files = [_read(path) for path in paths]
    names = [f"{told['environment']['mpi']}, {told['environment']['threads']}" for told in files]
    heads = ["bytes", *names, "ours, best", "x", "by", "ours, auto", "x", "auto/native", "floor"]
    lines = [_line(heads), _line(["---:"] * len(heads))]
    records = [r for told in files for r in told["results"] if not r["in_place"]]
    for size in sorted({r["bytes"] for r in records}):
        natives, ratios, ours = [], [], []
        for told in files:
            here = [r for r in told["results"] if r["bytes"] == size and not r["in_place"]]
            native = {r["memory"]: r["p50_us"] for r in here if r["algorithm"] == "native"}
            natives.append(min(native.values()))
            ours += [r for r in here if r["algorithm"] != "native"]
            ratios += [native[r["memory"]] / r["p50_us"] for r in here if r["algorithm"] == "auto"]
        fastest = min(natives)
        best = min(ours, key=lambda r: r["p50_us"])
        auto = min((r for r in ours if r["algorithm"] == "auto"), key=lambda r: r["p50_us"])
        floor = f"{100 * best['floor_us'] / best['p50_us']:.0f}%" if best.get("floor_us") else "-"
        lines.append(
            _line(
                [
                    _bytes(size),
                    *(f"{us:.1f}" for us in natives),
                    f"{best['p50_us']:.1f}",
                    f"{fastest / best['p50_us']:.2f}",
                    f"{best['ran']}, {best['memory']}",
                    f"{auto['p50_us']:.1f}",
                    f"{fastest / auto['p50_us']:.2f}",
                    f"{min(ratios):.2f}",
                    floor,
                ]
            )
        )
    return "\n".join(lines)
