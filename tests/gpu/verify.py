"""Everything that only a GPU can show, in one table: on the day that there is one.

    python -m tests.gpu.verify              # on a GPU; exit code 1 if a check fails
    python -m tests.gpu.verify --dry-run    # the same checks on a stand-in for CuPy, anywhere

Checks run on 1, 2 or 4 ranks, which share the GPUs that there are: each in processes of its own,
with a time limit; in a dry run, those of a stage in one job.  Checks of time run alone, at the end.
``MPIEXEC`` names the launcher.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from tests.gpu.check import RESULT, Check, checks

#: Stage whose checks take the time.
TIMED = 7


class Outcome(NamedTuple):
    """Outcome of a check on some ranks."""

    check: str
    stage: int
    ranks: int
    works: bool
    detail: str
    seconds: float


def run(checks: Sequence[Check], ranks: int, *, dry_run: bool) -> list[Outcome]:
    """Run checks in one job, which is ended when the sum of their times is over."""
    limit = sum(check.seconds for check in checks)
    command = [sys.executable, "-m", "tests.gpu.check", *(check.name for check in checks)]
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
            printed, why = process.communicate(timeout=limit)[0], ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, why = process.communicate()[0], f"no end after {limit:g} s"
    lines = printed.strip().splitlines() or ["nothing printed"]
    results = [json.loads(one.removeprefix(RESULT)) for one in lines if one.startswith(RESULT)]
    told = {name: rest for name, *rest in results}
    last = " ".join(lines[-1].split())[:200]
    missing = False, why or f"exit code {process.returncode}: {last}", perf_counter() - start
    if any(check.is_killed for check in checks):
        works = bool(process.returncode) and not told and not why
        missing = works, why or f"exit code {process.returncode}", missing[2]
    found = [
        Outcome(check.name, check.stage, ranks, *told.get(check.name, missing)) for check in checks
    ]
    if process.returncode and all(one.works for one in found) and told:
        found[-1] = found[-1]._replace(works=False, detail=missing[1])
    return found


def jobs(wanted: Sequence[Check], most: int, *, by_stage: bool) -> list[tuple[list[Check], int]]:
    """Checks of each job, and its ranks; ``by_stage``: one job for those that kill no rank."""
    found: dict[object, tuple[list[Check], int]] = {}
    for check in wanted:
        for ranks in check.ranks if by_stage else ():
            key = check.name if check.is_killed else check.stage
            found.setdefault((key, ranks), ([], ranks))[0].append(check)
    if not by_stage:
        return [([check], ranks) for check in wanted for ranks in check.ranks if ranks <= most]
    return [job for job in found.values() if job[1] <= most]


def line(one: Outcome) -> str:
    """Row of the table that is printed."""
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
    parser.add_argument("--at-once", type=int, default=1, help="jobs that run side by side")
    options = parser.parse_args(argv)
    stages = {int(text) for text in options.stages.split(",")} if options.stages else None
    print(f"{'check':<50} | ranks | ok   |      s | detail")
    wanted = [
        check
        for check in checks()
        if (stages is None or check.stage in stages) and (options.only or "") in check.name
    ]
    outcomes: list[Outcome] = []
    every = jobs(wanted, options.most_ranks, by_stage=options.dry_run)
    timed = [job for job in every if job[0][0].stage == TIMED]
    for some, width in ([job for job in every if job not in timed], options.at_once), (timed, 1):
        with ThreadPoolExecutor(width) as pool:
            for found in pool.map(lambda job: run(*job, dry_run=options.dry_run), some):
                outcomes += found
                print("\n".join(map(line, found)), flush=True)
    failed = sum(not one.works for one in outcomes)
    told = {"dry_run": options.dry_run, "outcomes": [one._asdict() for one in outcomes]}
    options.json.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{len(outcomes)} checks, {failed} failed; {options.json}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
