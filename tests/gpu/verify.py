"""Everything that only a GPU can show, in one table: on the day that there is one.

    python -m tests.gpu.verify              # on a GPU; exit code 1 if a check fails
    python -m tests.gpu.verify --dry-run    # the same checks on a stand-in for CuPy, anywhere

Each check runs in processes of its own, with a time limit, on 1, 2 or 4 ranks, which share the GPUs
that there are.  ``MPIEXEC`` names the launcher.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from tests.gpu.check import RESULT, Check, checks


class Outcome(NamedTuple):
    """Of a check on some ranks."""

    check: str
    stage: int
    ranks: int
    works: bool
    seconds: float
    detail: str


def run(check: Check, ranks: int, *, dry_run: bool) -> Outcome:
    """One check, in processes of its own, which are ended when its time is over."""
    command = [sys.executable, "-m", "tests.gpu.check", check.name]
    command += ["--dry-run"] if dry_run else []
    if ranks > 1:
        launcher = os.environ.get("MPIEXEC") or shutil.which("mpirun") or "mpiexec"
        command = [*launcher.split(), "-n", str(ranks), *command]
    start = perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=check.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            text = f"no end after {check.seconds:g} s"
            return Outcome(check.name, check.stage, ranks, False, check.seconds, text)
    lines = [line for line in printed.splitlines() if line.startswith(RESULT)]
    if lines:
        works, detail = json.loads(lines[-1].removeprefix(RESULT))
    else:
        last = " ".join((printed.strip().splitlines() or ["nothing printed"])[-1].split())
        works, detail = False, f"exit code {process.returncode}: {last[:200]}"
    seconds = perf_counter() - start
    if check.is_killed:
        works, detail = bool(process.returncode and not lines), f"exit code {process.returncode}"
    else:
        works = bool(works) and not process.returncode
    return Outcome(check.name, check.stage, ranks, works, seconds, detail)


def line(one: Outcome) -> str:
    """For people."""
    word = "ok" if one.works else "FAIL"
    return f"{one.check:<50} | {one.ranks:>5} | {word:<4} | {one.seconds:6.1f} | {one.detail}"


def main(argv: list[str] | None = None) -> int:
    """Run what is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.verify", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the stand-in for CuPy")
    parser.add_argument("--stages", help="numbers, as in 0,1; all by default")
    parser.add_argument("--only", help="part of a check's name")
    parser.add_argument("--most-ranks", type=int, default=4, help="leave out larger jobs")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="the same as a file")
    options = parser.parse_args(argv)
    stages = {int(text) for text in options.stages.split(",")} if options.stages else None
    print(f"{'check':<50} | ranks | ok   |      s | detail")
    outcomes = []
    for check in checks():
        if stages is not None and check.stage not in stages:
            continue
        for ranks in check.ranks if (options.only or "") in check.name else ():
            if ranks <= options.most_ranks:
                outcomes.append(run(check, ranks, dry_run=options.dry_run))
                print(line(outcomes[-1]), flush=True)
    failed = sum(not one.works for one in outcomes)
    told = {"dry_run": options.dry_run, "outcomes": [one._asdict() for one in outcomes]}
    options.json.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{len(outcomes)} checks, {failed} failed; {options.json}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
