"""Drawn programs of torch judge the shadow: does it tell mistakes, and let be what is right?

    python -m tests.zoo --seed 1 --count 200
    mpiexec -n 2 python -m tests.zoo --count 40 --kinds "side channel" "loss broadcasts"
    PYTHONPATH=. python -m collectives.virtual -n 4 tests/zoo/__main__.py --count 20

Each draw is trained right, in float64 as plain torch trains it and in float32, and with a mistake.
Plain torch and the trainer without its shadow say whether a mistake changes any number.
"""

import argparse
import faulthandler
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from collectives import Communicator
from tests.zoo.judge import Verdict, judge
from tests.zoo.mistakes import KINDS

COLUMNS = ("told", "told before", "silent", "agrees", "told, agrees")


def verdicts(comm: Any, seed: int, numbers: range, kinds: list[str]) -> Iterator[Verdict]:
    """The draws of these numbers, whose kinds take turns; collective."""
    folder = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
    try:
        for number in numbers:
            yield judge(comm, folder, seed, number, kinds[number % len(kinds)])
    finally:
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def table(found: list[Verdict]) -> str:
    """Rows by kind."""
    lines = [
        f"| kind | draws | {' | '.join(COLUMNS)} | wrong where right |",
        "| --- |" + " --- |" * 7,
    ]
    for kind in (*KINDS, "all"):
        own = [one for one in found if kind in (one.kind, "all")]
        if own:
            by = Counter(one.planted for one in own)
            cells = [len(own), *(by[name] for name in COLUMNS), sum(bool(one.right) for one in own)]
            lines.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    """Draws; 1 for a false alarm or other numbers of what is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw (0)")
    parser.add_argument("--count", type=int, default=200, help="draws (200)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Verdict] = []
    numbers = range(options.first, options.first + options.count)
    with Communicator(MPI.COMM_WORLD) as comm:
        for one in verdicts(comm, options.seed, numbers, options.kinds):
            faulthandler.dump_traceback_later(600, exit=True)
            found.append(one)
            if comm.rank == 0 and (one.right or one.planted in ("silent", "told, agrees")):
                said = f"{one.right or 'right'}; {one.kind}: {one.planted} {one.text}"
                print(f"draw {one.number} ({one.words}): {said}", flush=True)
        if comm.rank == 0:
            print(table(found))
    faulthandler.cancel_dump_traceback_later()
    return int(any(one.right for one in found))


if __name__ == "__main__":
    sys.exit(main())
