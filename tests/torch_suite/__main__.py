"""Runs PyTorch's own distributed tests over a backend, and compares with what is expected."""

import argparse
import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from tests.launch.programs import LAUNCHER, environment

#: Seconds until the first test, of a test, and of the other ranks after one of them failed.
START, SECONDS, AFTER_FAILURE = 300, 60, 10


class Job:
    """One MPI job that runs tests until one of them hangs, or the job ends."""

    def __init__(self, options: argparse.Namespace, folder: Path, done: list[str]) -> None:
        self.folder, self.ranks, self.status = folder, options.ranks, ""
        ours = [options.backend, options.guise, options.pattern, str(folder), json.dumps(done)]
        command = [LAUNCHER, "-n", str(options.ranks), sys.executable, "-m"]
        with open(folder / "output", "w") as output:
            self.process = subprocess.Popen(
                [*command, "tests.torch_suite.on_ranks", *ours],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(OMP_NUM_THREADS="1"),
                start_new_session=True,
            )

    def lines(self, kind: str) -> list[list]:
        """Lines that the ranks have written, in the order of ranks."""
        text = "".join(file.read_text() for file in sorted(self.folder.glob("*.jsonl")))
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("]")]
        return [line[1:] for line in lines if line[0] == kind]

    def results(self) -> dict[str, list[str]]:
        """Outcome and reason of each test that has begun."""
        results, ends = {}, collections.defaultdict(list)
        for name, *result in self.lines("ends"):
            ends[name].append(result)
        for (name,) in self.lines("begins"):
            failed = [result for result in ends[name] if result[0] == "fail"]
            if failed:
                results[name] = failed[0]
            elif len(ends[name]) < self.ranks:
                results[name] = [self.status, ""]
            elif len({outcome for outcome, _ in ends[name]}) > 1:
                results[name] = ["fail", "skipped by some ranks alone"]
            else:
                results[name] = ends[name][0]
        return results

    def wait(self) -> None:
        """Waits for the end of the job, or ends it; ``status`` tells which."""
        seen, since = 0, time.monotonic()
        while self.process.poll() is None:
            time.sleep(0.1)
            size = sum(file.stat().st_size for file in self.folder.glob("*.jsonl"))
            if size > seen:
                seen, since = size, time.monotonic()
            waited = time.monotonic() - since
            if waited > AFTER_FAILURE:
                last = [outcome for outcome, _ in self.results().values()][-1:]
                if waited > (AFTER_FAILURE if last == ["fail"] else SECONDS if last else START):
                    self.kill()
                    self.status = "hung"
                    return
        self.status = "died" if self.process.returncode else ""

    def kill(self) -> None:
        """Ends the launcher, which ends its ranks, and the ranks that are left."""
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for (pid,) in self.lines("process"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run(options: argparse.Namespace) -> dict[str, list[str]]:
    """Outcome ("ok", "skip", "fail", "hung", "died") and reason of each test."""
    results: dict[str, list[str]] = {}
    while True:
        with tempfile.TemporaryDirectory(prefix="torch_suite") as folder:
            job = Job(options, Path(folder), list(results))
            try:
                job.wait()
            finally:
                if job.process.poll() is None:
                    job.kill()
            new = job.results()
            results.update(new)
            if not job.status and not set(job.lines("names")[0][0]) - set(results):
                return results
            output = (Path(folder) / "output").read_text(errors="replace")
            if options.verbose or not new:
                print(output[-10000:], file=sys.stderr)
            if not new:
                sys.exit("the job ended before its first test")


def unexpected(options: argparse.Namespace, results: dict[str, list[str]]) -> list[str]:
    """Lines for the tests whose outcome is not the one that ``expected.toml`` gives them."""
    data = tomllib.loads(Path(__file__).with_name("expected.toml").read_text())
    reasons = "|".join(reason for skipped in data["skipped"] for reason in skipped["reasons"])
    name = options.guise or options.backend
    fails = {
        test: entry["outcome"]
        for entry in data["fails"]
        if options.backend != "gloo" and name in entry["as"]
        for test in entry["tests"]
    }
    lines = []
    for test, (outcome, why) in results.items():
        expected = fails.get(test, "ok")
        left_out = outcome in ("skip", "fail") and re.search(reasons, why)
        if outcome != expected and not left_out:
            lines.append(f"{test}: {outcome} in the place of {expected}: {why}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=__doc__)
    parser.add_argument("--backend", choices=["gloo", "collectives", "mpi"], default="collectives")
    parser.add_argument(
        "--as", dest="guise", default="", help="name that the tests see, which are gated by it"
    )
    parser.add_argument("-n", dest="ranks", type=int, default=2)
    parser.add_argument("-k", dest="pattern", default="", help="regular expression for names")
    parser.add_argument("--json", type=Path, help="file for the outcomes and reasons")
    parser.add_argument("-v", dest="verbose", action="store_true", help="the ranks' output, too")
    options = parser.parse_args()
    results = run(options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    lines = unexpected(options, results)
    count = collections.Counter(outcome for outcome, _ in results.values())
    print(", ".join(f"{count[outcome]} {outcome}" for outcome in sorted(count)))
    print(*lines, sep="\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
