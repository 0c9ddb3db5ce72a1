"""Seconds, modules and lines of ours that small programs load, each in a fresh process.

python -m benchmarks.start_up --repeats 9
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
_ALLREDUCE = "Communicator(MPI.COMM_WORLD).Allreduce(MPI.IN_PLACE, np.ones(8))"
_TRAIN = "from mpitrain.__main__ import main; main(['train', 'digits', '--set', 'train.steps=2'])"
PROGRAMS = {
    "Python": "",
    "numpy, mpi4py": "import numpy; from mpi4py import MPI",
    "import collectives": "import collectives",
    "an all-reduce": "import numpy as np; from mpi4py import MPI; "
    f"from collectives import Communicator; {_ALLREDUCE}",
    "import mpitrain": "import mpitrain",
    "mpitrain train digits, 2 steps": _TRAIN,
    "import torch": "import torch",
    "a torch group over MPI": "import torch.distributed as d; "
    "d.init_process_group('collectives', rank=0, world_size=1, store=d.HashStore())",
}
#: End of a program: it prints modules of ours, and lines of their files.
_COUNTED = """
import sys
ours = [m.__file__ for n, m in [*sys.modules.items()]
        if n.partition(".")[0] in ("collectives", "mpitrain") and getattr(m, "__file__", None)]
print("loaded", len(ours), sum(open(name).read().count("\\n") for name in ours))
"""


def started(code: str, folder: str) -> tuple[float, int, int]:
    """Seconds from a program's start to its end, and the modules and lines of ours it loaded.

    Raises:
        subprocess.CalledProcessError: the program failed.
    """
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    began = perf_counter()
    ended = subprocess.run(
        [sys.executable, "-c", code + _COUNTED],
        cwd=folder, env=os.environ | path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds = perf_counter() - began
    modules, lines = ended.stdout.splitlines()[-1].split()[1:]
    return seconds, int(modules), int(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="fresh processes of each program")
    parser.add_argument("--only", choices=PROGRAMS, help="one of the programs")
    options = parser.parse_args()
    table = Table("program", "seconds, median", "modules of ours", "lines of ours")
    for name in [options.only] if options.only else PROGRAMS:
        with tempfile.TemporaryDirectory() as folder:
            runs = [started(PROGRAMS[name], folder) for _ in range(options.repeats)]
        _, modules, lines = runs[0]
        table.add_row(name, f"{median(run[0] for run in runs):.2f}", f"{modules}", f"{lines:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
