"""Programs on ranks of their own, as a user starts them: with the launcher that MPIEXEC names."""

import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BESIDE = Path(sys.executable).with_name("mpiexec")
LAUNCHER = os.environ.get("MPIEXEC") or (str(_BESIDE) if _BESIDE.exists() else "mpirun")
MPITRAIN = (sys.executable, "-m", "mpitrain")
needs_launcher = pytest.mark.skipif(
    shutil.which(LAUNCHER) is None, reason=f"no MPI launcher {LAUNCHER!r}; set MPIEXEC to one"
)
needs_digits = pytest.mark.skipif(
    find_spec("sklearn") is None, reason="scikit-learn is not installed"
)
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
#: A short job on the digits; ``steps`` and ``hidden`` are to be filled in.
DIGITS = """
[run]
seed = 5
log_every = 1000
[data]
name = "digits"
[model]
kind = "mlp"
hidden = [{hidden}]
[train]
epochs = 100
steps = {steps}
batch_size = 48
[checkpoint]
every = 10
"""


def environment(**variables):
    """Variables with which ranks find the packages and may be more than there are cores."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        # Open MPI's way; other launchers always allow more ranks than cores.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **variables,
    }


def command(arguments, ranks):
    """``python arguments`` on ``ranks`` ranks, or without a launcher for ``None``."""
    launch = [] if ranks is None else [LAUNCHER, "-n", str(ranks)]
    return [*launch, sys.executable, *map(str, arguments)]


def run(folder, *arguments, ranks=None, seconds=100, **variables):
    """The completed process of ``python arguments`` in ``folder``."""
    return subprocess.run(
        command(arguments, ranks),
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def run_text(folder, text, *arguments, before=(), **how):
    """The completed process of a program of this text; ``before``: words before its name."""
    (folder / "program.py").write_text(text)
    return run(folder, *before, folder / "program.py", *arguments, **how)


def start(*arguments, ranks, **variables):
    """The process of ``python arguments`` in the repository's folder, in a session of its own."""
    return subprocess.Popen(
        command(arguments, ranks),
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process, seconds=100):
    """Output and errors of a process; one that hangs is killed, so that no other test waits."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
