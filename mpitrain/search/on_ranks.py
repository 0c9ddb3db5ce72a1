"""Programs on ranks of this machine, which ``mpiexec`` starts and which end in time."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shutil import which
from tempfile import TemporaryFile

from mpitrain.config import ConfigError

#: Seconds in which ranks import what they need and meet, on a slow file system, too.
START_S = 300.0
#: How an error of ours begins.
_OURS = "mpitrain: "
#: Seconds in which ``mpiexec`` ends its ranks when asked.
_END_S = 10.0


def on_ranks(ranks: int, *words: str, seconds: float = START_S) -> str:
    """The output of a module of Python on so many ranks; ``words``: its name and arguments.

    Raises:
        ConfigError: it cannot be started, fails, or takes longer than ``seconds``.
    """
    found = which("mpiexec") or str(Path(sys.executable).with_name("mpiexec"))
    start = shlex.split(os.environ.get("MPIEXEC", "")) or [found]
    command = [*start, "-n", str(ranks), sys.executable, "-m", *words]
    return output(command, f"{' '.join(start)} -n {ranks}", seconds)


def output(command: Sequence[str], who: str, seconds: float) -> str:
    """The output of a command, which errors call ``who``; errors are as for :func:`on_ranks`."""
    # Files, as ranks that outlive mpiexec would keep a pipe open.
    with TemporaryFile("w+") as told, TemporaryFile("w+") as failed:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=told, stderr=failed
            )
        except OSError as error:
            raise ConfigError(f"{who}: {error.strerror}; set MPIEXEC to MPI's launcher") from error
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{who}: ranks have not ended after {seconds:.0f} s") from None
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
        told.seek(0)
        failed.seek(0)
        if process.returncode:
            raise ConfigError(f"{who}: {reason(failed.read())}")
        return told.read()


def reason(told: str) -> str:
    """Why ranks failed: our own words, or the last line before the launcher's, or the launcher's
    words, which are in boxes."""
    if ours := [line for line in told.splitlines() if line.startswith(_OURS)]:
        return ours[-1].removeprefix(_OURS)
    before, *boxes = re.split(r"^(?:[-=]{9,}|Abort\(.*)$", told.strip("\0\n "), flags=re.MULTILINE)
    return " ".join(before.strip().splitlines()[-1:] or " ".join(boxes).split())
