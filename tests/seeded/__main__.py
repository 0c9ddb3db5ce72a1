"""Puts one fault after another into a copy of the package, and runs the tests on it.

    python -m tests.seeded                  # what make test runs
    python -m tests.seeded --full           # what make test-full adds, for those that got past it
    python -m tests.seeded --near           # only the file that is likely to notice each
    python -m tests.seeded --only gaps,ring # those whose name, or file near, has one of these

A fault is caught by the first part of the tests that fails, or does not end in time.  Ends with 1
if one was caught by none.  The parts are those of the Makefile.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.seeded import of_collectives, of_mpitrain
from tests.seeded.fault import ROOT, Fault

FAULTS = [*of_collectives.FAULTS, *of_mpitrain.FAULTS]
#: They look the faults up in the code, and would notice each.
OF_THE_FAULTS = "tests/unit/test_seeded.py"
LAUNCHER = os.environ.get("MPIEXEC", "mpiexec")


class Part(NamedTuple):
    """Some of the tests; a fault that makes them hang is caught after ``seconds``."""

    name: str
    command: list[str]
    seconds: int


def parts(fault: Fault, full: bool, near: bool) -> list[Part]:
    """All, and before them the file of those that is likely to notice the fault."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "--color=no"]
    pytest += ["-o", "faulthandler_timeout=120"]
    beside = ["-n", "3", "--dist=worksteal", "--max-worker-restart=0"]
    quick = [f"--ignore={OF_THE_FAULTS}", *([] if full else ["-m", "not slow"])]
    mpi = ["--with-mpi", "-m", "mpi" if full else "mpi and not slow"]
    few, trainer = ("tests/mpi/collectives", "tests/mpi/mpitrain")
    ranks = [(3, few), (2, trainer)]
    if full:
        ranks = [(size, folder) for size in (4, 2, 3, 1, 5, 7, 8) for folder in (few, trainer)]

    def on_ranks(size: int, tests: str, seconds: int = 900) -> Part:
        return Part(f"{size} ranks", [LAUNCHER, "-n", str(size), *pytest, *mpi, tests], seconds)

    first = Part("without MPI", [*pytest, *quick, fault.near], 240)
    if fault.near.startswith("tests/mpi"):
        first = on_ranks(3 if fault.near.startswith(few) else 2, fault.near, 240)
    if near:
        return [first]
    return [
        first,
        Part("without MPI", [*pytest, *quick, *beside, "tests/local", "tests/unit"], 900),
        *(on_ranks(size, folder) for size, folder in ranks),
        Part("launchers", [*pytest, *quick, *beside, "tests/launch"], 900),
    ]


def seeded(fault: Fault, folder: Path) -> None:
    """A copy of the files that git tracks, with the fault in it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    (folder / fault.path).write_text(fault.text(folder))


def caught_by(fault: Fault, full: bool, near: bool) -> str | None:
    """The first part that notices, ``None`` if none does."""
    with tempfile.TemporaryDirectory(prefix="seeded-") as name:
        folder = Path(name)
        seeded(fault, folder)
        environment = os.environ | {"PYTHONPATH": name, "OMP_NUM_THREADS": "1"}
        run = partial(subprocess.run, cwd=folder, env=environment, capture_output=True)
        for part in parts(fault, full, near):
            try:
                done = run(part.command, timeout=part.seconds)
            except subprocess.TimeoutExpired:
                return f"{part.name}: they hang"
            if done.returncode not in (0, 5):  # 5: on so many ranks, none is quick
                text = done.stdout.decode(errors="replace")
                failed = [line for line in text.splitlines() if line.startswith("FAILED")]
                return f"{part.name}: {failed[0][7:107] if failed else 'they end early'}"
    return None


def main() -> int:
    """One line a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.seeded", description=__doc__)
    parser.add_argument("--full", action="store_true", help="slow tests, too")
    parser.add_argument("--near", action="store_true", help="only the file near each fault")
    parser.add_argument("--only", default="", help="words of names or files near, as in a,b")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    options = parser.parse_args()
    words = options.only.split(",")
    chosen = [
        fault for fault in FAULTS if any(word in f"{fault.name} {fault.near}" for word in words)
    ]
    missed = 0
    for fault in chosen:
        if options.list:
            print(f"{fault.name} ({fault.path})")
            continue
        begun = time.monotonic()
        found = caught_by(fault, options.full, options.near)
        missed += found is None
        seconds = time.monotonic() - begun
        print(f"{fault.name} | {found or 'NOT CAUGHT'} | {seconds:.0f} s", flush=True)
    if not options.list:
        print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
