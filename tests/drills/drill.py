"""A job with a fault: run, resumed, and judged by the weights of a run without."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TypeVar

from msgspec import Struct

from mpitrain.arrays import Array
from mpitrain.checkpoint.manifest import CheckpointError
from mpitrain.checkpoint.reader import CheckpointReader, newest
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Start, Straggler, Summary
from tests.drills.faults import KINDS, Fault
from tests.drills.outside import Outside
from tests.processes import running, until

#: A job without a fault takes no longer.
_PATIENCE_S = 600.0
#: How long processes may outlive their job.
_LEFT_S = 10.0
_POLL_S = 0.005
_Kind = TypeVar("_Kind")


class Outcome(Struct, frozen=True):
    fault: str  # as str writes it
    kind: str
    #: "went on", to the weights of a run without; "named": failed, said why, and came to these
    #: weights when it was resumed; "skipped"; or what was wrong.
    verdict: str
    good: bool = False  # that is as it should be
    seconds: float = 0.0  # from the fault's step to the end of the job
    words: str = ""  # output, or reason of a skip
    lost: int = 0  # steps that had to be done again


@dataclass(frozen=True)
class Drills:
    launcher: Sequence[str]  # the words before python
    job: Path  # its file
    folder: Path  # for the runs
    settings: Sequence[str] = ()  # table.key=value each, for all of them
    outside: Mapping[str, Outside] = field(default_factory=dict)  # around a job, by kind
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    hang_s: float = 60.0  # a job that has not ended so long after its fault hangs
    watchdog_s: float = 8.0  # a rank that waits for so long says who is missing

    def reference(self) -> tuple[dict[str, Array], int]:
        """The weights that a run ends with when nothing happens to it, and its steps."""
        run = self.folder / "undisturbed"
        with self._aside() as aside:
            status = _wait(aside._start(run))
        if status != 0:
            raise RuntimeError(f"the job fails even when nothing happens to it:\n{_said(run)}")
        checkpoint = _newest(run)
        return _weights(checkpoint), checkpoint.manifest.progress.step

    def drill(self, fault: Fault, weights: Mapping[str, Array]) -> Outcome:
        """Run, break, resume; ``weights`` are to come out."""
        outside = self.outside.get(fault.kind)
        if outside is None and not KINDS[fault.kind].inside:
            why = "it needs two hosts; python -m tests.cluster.drills has them"
            return Outcome(str(fault), fault.kind, "skipped", good=True, words=why)
        if outside and (why := outside.missing()):
            return Outcome(str(fault), fault.kind, "skipped", good=True, words=why)
        run = self.folder / f"{fault.kind}-{fault.seed}"
        with self._aside() as aside, outside.around(run) if outside else nullcontext():
            return aside._drill(fault, run, outside, weights)

    @contextmanager
    def _aside(self) -> Iterator["Drills"]:
        """These drills with a TMPDIR of their own.

        A launcher that is killed leaves its session folder there, named by its process number, and
        Open MPI's next launcher of that number refuses to start.
        """
        with TemporaryDirectory(prefix="mpitrain-", ignore_cleanup_errors=True) as folder:
            yield replace(self, environment={**self.environment, "TMPDIR": folder})

    def _drill(
        self, fault: Fault, run: Path, outside: Outside | None, weights: Mapping[str, Array]
    ) -> Outcome:
        settings = KINDS[fault.kind].settings
        process = self._start(run, settings, () if outside else ("--fault", str(fault)))
        seconds = self._watch(process, fault, run, outside)

        def outcome(verdict: str, words: str, *, good: bool = False, lost: int = 0) -> Outcome:
            return Outcome(
                str(fault), fault.kind, verdict, good, round(seconds, 2), words[-300:], lost
            )

        status, said = process.returncode, _said(run)
        if outside:
            outside.mend(run)
        if status is None:
            _end(process)
            _left(run)
            return outcome("hangs", said)
        if status < 0:  # on one host, Open MPI's daemon is the launcher itself
            said += f"\nthe launcher was killed by signal {-status}\n"
        if _left(run):
            return outcome("leaves processes behind", said)
        if status == 0 and _of(run, Summary):
            if not _same(_newest(run), weights):
                return outcome("ends with other weights", said)
            return outcome("went on", _straggler(run), good=True)
        words = fault.named().search(said)
        if KINDS[fault.kind].survives or not words:
            return outcome("ends unnamed", said)
        reached = _count_steps(run / "metrics.jsonl")
        try:
            at = _newest(run).manifest.progress.step
        except (CheckpointError, LookupError):
            at = 0  # it was killed before the first was complete
        again = self._start(run, settings, ("--resume",))
        if _wait(again) != 0:
            return outcome("cannot be resumed", _said(run))
        if not _same(_newest(run), weights):
            return outcome("ends with other weights when resumed", said)
        line = said[words.start() :].partition("\n")[0][:200]
        return outcome("named", line, good=True, lost=max(0, reached - at))

    def _watch(
        self, process: subprocess.Popen[str], fault: Fault, run: Path, outside: Outside | None
    ) -> float:
        """Wait for the fault's step, break what is around the job, wait for its end; seconds."""
        report = run / "metrics.jsonl"

        def has_ended() -> bool:
            return process.poll() is not None

        until(lambda: has_ended() or _count_steps(report) + 1 >= fault.step, _PATIENCE_S, _POLL_S)
        began = monotonic()
        if outside and not has_ended():
            outside.strike(run)
        until(has_ended, self.hang_s, _POLL_S)
        return monotonic() - began

    def _start(
        self, run: Path, settings: Sequence[str] = (), options: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        run.mkdir(parents=True, exist_ok=True)
        program = [sys.executable, "-m", "tests.drills.train", "train", str(self.job)]
        command = [*self.launcher, *program]
        for setting in (*self.settings, *settings, f"run.dir={run}"):
            command += ["--set", setting]
        with (run / "output").open("a") as output:
            return subprocess.Popen(
                [*command, *options],
                env={**self.environment, "COLLECTIVES_TIMEOUT": str(self.watchdog_s)},
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )


def _wait(process: subprocess.Popen[str]) -> int | None:
    try:
        return process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        _end(process)
        return None


def _end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _said(run: Path) -> str:
    """The output; MPICH's launcher names processes, and the run's report says whose they were."""
    said = (run / "output").read_text(errors="replace")
    dead = re.search(r"PID (\d+) RUNNING AT", said)
    starts = _of(run, Start)
    if dead and starts:
        for rank, place in enumerate(starts[-1].processes):
            if place.endswith(f":{dead[1]}"):
                said += f"\nrank {rank} was process {place}\n"
    return said


def _of(run: Path, kind: type[_Kind]) -> list[_Kind]:
    path = run / "metrics.jsonl"
    return read_records(path).of(kind) if path.exists() else []


def _count_steps(path: Path) -> int:
    """Number of steps in a file, 0 without a file; quick, for polling."""
    return path.read_bytes().count(b'{"event":"step",') if path.exists() else 0


def _straggler(run: Path) -> str:
    found = _of(run, Straggler)
    if not found:
        return ""
    worst = max(found, key=lambda record: record.factor)
    return f"rank {worst.rank} took {worst.factor:.1f} times as long up to step {worst.step}"


def _left(run: Path) -> list[int]:
    """Processes of this machine that still work on a run, some time after its end."""
    word = f"run.dir={run}"
    until(lambda: not running(word), _LEFT_S)
    for number in (found := list(running(word))):
        os.kill(number, signal.SIGKILL)
    return found


def _newest(run: Path) -> CheckpointReader:
    found, refused = newest(run / "checkpoints")
    if refused:
        raise CheckpointError(refused[0])
    if found is None:
        raise LookupError(f"{run} has no checkpoint")
    return found


def _weights(checkpoint: CheckpointReader) -> dict[str, Array]:
    return {name: checkpoint.value(name) for name in checkpoint.names}


def _same(checkpoint: CheckpointReader, weights: Mapping[str, Array]) -> bool:
    found = _weights(checkpoint)
    return found.keys() == weights.keys() and all(
        found[name].tobytes() == values.tobytes() for name, values in weights.items()
    )
