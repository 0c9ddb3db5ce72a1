"""Programs on ranks of this machine, which ``mpiexec`` starts and which end in time."""

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from shutil import which
from tempfile import TemporaryFile

from mpitrain.config import ConfigError

#: Seconds in which ranks import what they need and meet, on a slow file system, too.
START_S = 300.0
#: Seconds in which ``mpiexec`` ends its ranks when asked.
_END_S = 10.0


def on_ranks(ranks: int, *words: str, seconds: float = START_S) -> str:
    """The output of a module of Python on so many ranks; ``words``: its name and arguments.

    Raises:
        ConfigError: it cannot be started, fails, or takes longer than ``seconds``.
    """
    found = which("mpiexec") or str(Path(sys.executable).with_name("mpiexec"))
    start = shlex.split(os.environ.get("MPIEXEC", "")) or [found]
    who = f"{' '.join(start)} -n {ranks}"
    # Files, as ranks that outlive mpiexec would keep a pipe open.
    with TemporaryFile("w+") as told, TemporaryFile("w+") as failed:
        try:
            process = subprocess.Popen(
                [*start, "-n", str(ranks), sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL, stdout=told, stderr=failed,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"{who}: {error.strerror}") from error
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
            raise ConfigError(f"{who}: {failed.read().strip().rpartition(chr(10))[2]}")
        return told.read()
