"""Runs tests of other projects over ours, and over what they were written for."""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import NamedTuple

from tests.launch import programs

#: How many tests ran, and what failed, with its traceback.
Outcome = tuple[int, dict[str, str]]
#: Time for one file on one number of ranks; many ranks take long on few cores.
SECONDS = 1800
#: mpi4py's tests that meet a communicator which can be ours.
MPI4PY_FILES = (
    "cco_buf,cco_vec,cco_nb_buf,cco_nb_vec,cco_pr_buf,cco_pr_vec,cco_obj,cco_ngh_buf,"
    "cco_ngh_obj,cco_pr_ngh_buf,cco_buf_inter,cco_vec_inter,cco_obj_inter,comm,comm_inter,"
    "comm_topo,msgspec,msgzero,p2p_buf,p2p_buf_matched,p2p_buf_part,p2p_obj,p2p_obj_matched,"
    "request,grequest,status,attributes,errhandler,exceptions,group,handle,op,pickle,"
    "subclass,threads,ulfm,util_pkl5,util_pool,util_sync,win,rma"
)
#: Where Heat is, its version, and its tests that communicate most.
HEAT_AT, HEAT = "https://github.com/helmholtz-analytics/heat", "1.8.0"
HEAT_FILES = (
    "test_basic_test.py,core/test_arithmetics.py,core/test_communication.py,core/test_dndarray.py,"
    "core/test_indexing.py,core/test_logical.py,core/test_manipulations.py,core/test_memory.py,"
    "core/test_random.py,core/test_rounding.py,core/test_statistics.py,core/test_tiling.py,"
    "core/linalg/test_basics.py,core/linalg/test_qr.py,core/linalg/test_solver.py,"
    "core/linalg/test_svd.py,sparse/test_arithmetics_csr.py,sparse/test_dcscmatrix.py,"
    "sparse/test_dcsrmatrix.py,sparse/test_sparse_factories.py,sparse/test_sparse_manipulations.py"
)
ACCELERATE = ("accelerate==1.15.0", "psutil==7.2.2")
#: Its other scripts want GPUs or data sets, or wait for ever over Gloo on a CPU.
ACCELERATE_FILES = "test_ops.py,test_script.py,test_sync.py"


class Ended(NamedTuple):
    stdout: str
    stderr: str
    status: int


def path(where: Path) -> str:
    """Where Python finds a project's sources, and then ours."""
    return os.pathsep.join([str(where), programs.environment()["PYTHONPATH"]])


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words, "-q", "--no-deps"], check=True)


def of_pypi(folder: Path, name: str, number: str) -> Path:
    """A source package."""
    into = folder / f"{name}-{number}"
    if not into.exists():
        pip("download", "--no-binary", name, "-d", str(folder), f"{name}=={number}")
        with tarfile.open(folder / f"{name}-{number}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return into


def fetch_mpi4py(folder: Path, _: str) -> Path:
    return of_pypi(folder, "mpi4py", version("mpi4py"))


def fetch_heat(folder: Path, source: str) -> Path:
    """Heat's repository from a URL or a folder; "pypi": its package, with one file of tests."""
    if source == "pypi":
        return of_pypi(folder, "heat", HEAT)
    into = folder / f"heat-{HEAT}-whole"
    if not into.exists():
        clone = f"git -c advice.detachedHead=false clone -q --depth 1 --branch v{HEAT}".split()
        quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        subprocess.run([*clone, source, str(into)], check=True, timeout=300, env=quiet)
    return into


def fetch_accelerate(folder: Path, _: str) -> Path:
    into = folder / ACCELERATE[0]
    if not into.exists():
        pip("install", "--target", str(into), *ACCELERATE)
    return into


def run(where: Path, *words: object, ranks: int | None, **variables: str) -> Ended:
    """The end of ``python words`` on ranks; a launcher ends its ranks where it is ended itself."""
    started = subprocess.Popen(
        programs.command(words, ranks),
        cwd=where,
        env=programs.environment(PYTHONPATH=path(where), **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        return Ended(*started.communicate(timeout=SECONDS), started.returncode)
    except subprocess.TimeoutExpired:
        started.terminate()
        started.communicate()
        raise


def run_on_ranks(where: Path, file: Path, size: int, how: str) -> Outcome:
    """A file of mpi4py's or Heat's tests; ``how``: see the command's help."""
    before = [] if how in ("ours", "theirs") else ["-m", "collectives", *how.split()]
    if how == "virtual":
        before = ["-m", "collectives.virtual", "-n", size]
    words = [*before, Path(__file__).with_name("on_ranks.py"), how, file]
    done = run(where, *words, ranks=None if how == "virtual" else size)
    try:
        ran, failed = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return 0, {file.name: f"ended with {done.status}: {done.stderr[-2000:]}"}
    return ran, failed


def run_accelerate(where: Path, file: Path, size: int, how: str) -> Outcome:
    """Over our backend, or as torchrun starts it; a script is a test."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", size]
    is_ours = how == "ours"
    words = [*(["-m", "collectives.torch"] if is_ours else torchrun), file]
    done = run(where, *words, ranks=size if is_ours else None, ACCELERATE_USE_CPU="true")
    return 1, {file.name: done.stderr[-2000:]} if done.status else {}


class Judge(NamedTuple):
    """A project: what its tests were written for, where they are, and how to have and run them.

    ``if_failed``: the other library has its turn only where ours fails.
    """

    theirs: str
    folder: str
    files: str
    fetch: Callable[[Path, str], Path]
    run: Callable[[Path, Path, int, str], Outcome]
    if_failed: bool = False


JUDGES = {
    "mpi4py": Judge("plain mpi4py", "test", MPI4PY_FILES, fetch_mpi4py, run_on_ranks, True),
    "heat": Judge("mpi4py", "tests", HEAT_FILES, fetch_heat, run_on_ranks),
    "accelerate": Judge(
        "Gloo", "accelerate/test_utils/scripts", ACCELERATE_FILES, fetch_accelerate, run_accelerate
    ),
}


def table(judge: Judge, where: Path, files: list[str], sizes: list[int], over: str) -> int:
    """Prints a table; returns how many tests fail that pass over the other library."""
    columns = ("tests", "ranks", "passed, ours", "failed, ours", "passed", "failed")
    print(f"| {' | '.join(columns)}, {judge.theirs} |\n| --- | {'---: | ' * 5}")
    worse = 0
    for file, size in product(files, sizes):
        found: list[Outcome] = []
        for how in (over, "theirs"):
            if found and judge.if_failed and not found[0][1]:
                found.append((0, {}))
                continue
            try:
                found.append(judge.run(where, where / judge.folder / file, size, how))
            except subprocess.TimeoutExpired:
                found.append((0, {file: f"did not end in {SECONDS} s"}))
        (ours, failed), (theirs, known) = found
        counts = " | ".join(f"{max(0, ran - len(bad))} | {len(bad)}" for ran, bad in found)
        print(f"| {file} | {size} | {counts} |", flush=True)
        if not (ours or theirs or failed):
            failed = {file: "no test ran"}
        for test in failed.keys() - known.keys():
            worse += 1
            print(f"{file}: {test}:\n{failed[test]}", file=sys.stderr, flush=True)
    return worse


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judges", description=__doc__)
    parser.add_argument("judge", choices=JUDGES)
    parser.add_argument("--sizes", default="2", help="numbers of ranks")
    parser.add_argument("--files", default="", help="some of its tests; default: all")
    parser.add_argument(
        "--how",
        default="ours",
        help="ours in the place of the constants; or, of mpi4py's, 'run', "
        "'run --profile=/tmp/judges/run': as unchanged programs; virtual: on virtual ranks",
    )
    parser.add_argument(
        "--source", default=HEAT_AT, help='Heat\'s, or "pypi"; default: %(default)s'
    )
    options = parser.parse_args()
    judge = JUDGES[options.judge]
    if options.judge != "mpi4py" and find_spec("torch") is None:
        print("skipped: PyTorch is not installed; TORCH=1 brings it")
        return 0
    folder = Path(tempfile.gettempdir()) / "judges"
    folder.mkdir(exist_ok=True)
    try:
        where = judge.fetch(folder, options.source)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"skipped: the tests cannot be had: {error}")
        return 0
    files = (options.files or judge.files).split(",")
    if options.judge == "mpi4py":
        files = [f"test_{file}.py" for file in files]
    elif not options.files:
        files = [file for file in files if (where / judge.folder / file).exists()]
    sizes = [*map(int, options.sizes.split(","))]
    return 1 if table(judge, where, files, sizes, options.how) else 0


if __name__ == "__main__":
    sys.exit(main())
