"""``mpirun -n P python -m collectives tune``: measures what ``algorithm="auto"`` goes by."""

import argparse
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from collectives.algorithms import build, names, own
from collectives.bench import report
from collectives.bench.measure import Case, Result, measure
from collectives.bench.point_to_point import half_round_trip
from collectives.calls.choice import Entry, Kind, Rule, Table
from collectives.calls.native import library
from collectives.calls.tables import load, users
from collectives.communicator import Communicator
from collectives.contracts import CONTRACTS
from collectives.errors import CollectiveError
from collectives.files import replace as replace_file

#: Ours has to be this much faster than native to be chosen: figures repeat no better.
CLEARLY = 1.05
#: Ratio between two of ours that decides nothing: on two ranks many algorithms do nearly the same,
#: and the preferred ones stay good on more ranks.
ALIKE = 1.15
#: With segments, these fill the links that they leave idle without.
_PIPELINED = {
    "broadcast": ["chain:segments=8", "double_binary_tree:segments=8"],
    "reduce": ["chain:segments=8", "double_binary_tree:segments=8"],
}


#: Preference among equally fast algorithms.
_PREFERRED = ("direct", "ring", "pairwise", "butterfly", "binomial_tree")


def candidates(collective: str, size: int) -> list[str]:
    """Measured algorithms: native, and ours that differ on this number of ranks."""
    different: dict[object, str] = {}
    preference = {name: place for place, name in enumerate(_PREFERRED)}
    # Other programs read the table and do not know this one's own algorithms.
    there = [name for name in names(collective, size) if not own(collective, name)]
    ours = sorted(there, key=lambda name: preference.get(name, len(preference)))
    for name in [*ours, *_PIPELINED.get(collective, [])]:
        schedule = build(collective, name, size)
        rounds = tuple(
            hash(tuple(frozenset(steps) for steps in schedule.rounds(rank) if steps))
            for rank in range(size)  # its steps themselves, of all ranks, would fill the memory
        )
        different.setdefault((schedule.chunks, rounds), name)
    return [*different.values(), "native"]


def tune(
    comm: Communicator, options: argparse.Namespace, lengths: list[int], known: list[Entry]
) -> str:
    """Measures, and merges the entries with those known into ``options.output``.  Collective.

    Returns why the file cannot be written, on all ranks, or nothing.

    Args:
        lengths: sizes of the larger buffer in bytes.
        known: result of :func:`known_entries`.
    """
    collectives = [options.collective] if options.collective else [*CONTRACTS]
    collectives = [c for c in collectives if c != "barrier"]
    memories: list[Kind] = ["numpy", "shared"] if comm.nodes == 1 else ["numpy"]
    measured: dict[tuple[str, Kind], list[list[Result]]] = {}
    for number in range(options.passes):
        for collective, memory in product(collectives, memories):
            if comm.rank == 0:
                print(f"pass {number + 1} of {options.passes}: {collective}, {memory}", flush=True)
            ours = candidates(collective, comm.size)
            local = comm.ranks_per_node
            if collective == "allreduce" and local < comm.size and comm.size % local == 0:
                ours.append(f"hierarchical:local={local},intra=direct,segments=16")
            results = [
                measure(comm, replace(case, algorithms=ours, memory=memory))
                for case in cases(collective, lengths, comm.size, options.repeats)
            ]
            joined = measured.setdefault((collective, memory), results)
            for before, after in zip(joined, results) if number else ():
                for one, other in zip(before, after):
                    one.times_us += other.times_us
    entries = []
    for (collective, memory), results in measured.items():
        if not results:
            if comm.rank == 0:
                print(f"{collective}, {memory}: no size has an item in each block", flush=True)
            continue
        ranks = comm.size, comm.ranks_per_node
        entry = Entry(library(), collective, memory, *ranks, rules(results))
        entries.append(entry)
        if comm.rank == 0:
            told = (f"from {r.from_bytes} B {r.algorithm} ({r.ratio:g}x)" for r in entry.rules)
            print(f"{collective}, {memory}: {'; '.join(told)}", flush=True)
    alpha_us, bandwidth = ping_pong(comm)
    about = report.environment(comm)
    table = Table(1, about, alpha_us, bandwidth, _merged(known, entries))
    text = msgspec.json.format(msgspec.json.encode(table), indent=1).decode()
    # Atomic, as jobs may be reading it.
    why = report.unwritten(comm, lambda: replace_file(options.output, text))
    if comm.rank == 0:
        use = "auto" if options.output == users() else f"COLLECTIVES_TUNING={options.output}"
        used = f"wrote {options.output}; {use} uses it"
        print(text if why else used, flush=True)
    return f"{why}; the table stands above, to be copied into another file" if why else ""


def cases(collective: str, lengths: list[int], size: int, repeats: int) -> list[Case]:
    """Cases at these sizes: blocks of one item or more, each number of items once."""
    kind = np.dtype(np.float32)
    every = [Case(collective, nbytes, kind, "sum", [], repeats) for nbytes in lengths]
    found = {case.count(size): case for case in every}
    return [case for count, case in found.items() if count]


def rules(measured: list[list[Result]]) -> list[Rule]:
    """The fastest algorithm from each size on; native unless one is clearly faster.

    It is clearly faster in three of four repeats, each beside native's time in the same repeat, as
    a table outlives the state of a machine.
    """
    found: list[Rule] = []
    for results in measured:
        native = next(r for r in results if r.algorithm == "native")
        times = {r.algorithm: r.time_us for r in results if _is_clear(r, native)}
        last = found[-1].algorithm if found else None
        best = _preferred(times, last) if times else "native"
        if best != last:
            start = results[0].bytes if found else 0
            found.append(
                Rule(start, best, round(native.time_us / times.get(best, native.time_us), 2))
            )
    return found


def _preferred(times: dict[str, float], last: str | None) -> str:
    """One of the fastest, ``last`` if it is among them: the choice for the size before."""
    alike = [name for name, time in times.items() if time < ALIKE * min(times.values())]
    if last in alike:
        return last
    return next((name for name in _PREFERRED if name in alike), alike[0])


def _is_clear(ours: Result, native: Result) -> bool:
    ratios = np.sort(np.divide(native.times_us, ours.times_us))
    return bool(ratios[len(ratios) // 4] >= CLEARLY)


def ping_pong(comm: Communicator) -> tuple[float, float]:
    """Microseconds of a message of 8 bytes and GB/s of large ones, first to last rank."""
    if comm.size == 1:
        return 1.0, 10.0
    small, large = 8, 4 << 20
    alpha = half_round_trip(comm, small, turns=1000)
    beta = max(half_round_trip(comm, large, turns=20) - alpha, 1e-9) / large
    return round(1e6 * alpha, 3), float(f"{1e-9 / beta:.3g}")


def known_entries(comm: Communicator, path: Path) -> list[Entry]:
    """Entries of an existing table in ``path``, on rank 0.

    Raises:
        CollectiveError: on all ranks, at the beginning, if it cannot be read or written.
    """
    known: list[Entry] = []

    def read() -> None:
        folder = path.parent
        if path == users():
            folder.mkdir(parents=True, exist_ok=True)
        if not (folder.is_dir() and os.access(path if path.exists() else folder, os.W_OK)):
            raise CollectiveError(f"cannot write {path}")
        try:
            known.extend(load(path).entries if path.exists() else [])
        except CollectiveError as error:
            raise CollectiveError(f"{error}; it is left as it was") from error

    if why := report.unwritten(comm, read):
        raise CollectiveError(why)
    return known


def _merged(known: list[Entry], new: list[Entry]) -> list[Entry]:
    """Entries with the new ones in place of those of the same situation."""
    fresh = {situation(entry) for entry in new}
    return [*(entry for entry in known if situation(entry) not in fresh), *new]


def situation(entry: Entry) -> tuple[Any, ...]:
    """Everything that an entry is chosen by."""
    return entry.mpi, entry.collective, entry.memory, entry.ranks, entry.ranks_per_node
