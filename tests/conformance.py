"""mpi4py's own tests, with our communicator in the place of ``COMM_WORLD`` and
``COMM_SELF``: ``make conformance``.

The tests come from mpi4py's source package, of the version that is installed; no copy is kept here.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import unittest
from importlib.metadata import version
from pathlib import Path

#: All that meet a communicator which can be ours.
MODULES = (
    "cco_buf,cco_vec,cco_nb_buf,cco_nb_vec,cco_pr_buf,cco_pr_vec,cco_obj,cco_ngh_buf,"
    "cco_ngh_obj,cco_pr_ngh_buf,cco_buf_inter,cco_vec_inter,cco_obj_inter,comm,comm_inter,"
    "comm_topo,msgspec,msgzero,p2p_buf,p2p_buf_matched,p2p_buf_part,p2p_obj,p2p_obj_matched,"
    "request,grequest,status,attributes,errhandler,exceptions,group,handle,op,pickle,"
    "subclass,threads,ulfm,util_pkl5,util_pool,util_sync,win,rma"
)
#: What these ask of the constants ``MPI.COMM_WORLD`` and ``MPI.COMM_SELF``, which ours stands for
#: but is not: to be found by name.
OF_CONSTANTS = {
    "testPickle (test_comm.TestCommSelf.testPickle)",
    "testPickle (test_comm.TestCommWorld.testPickle)",
}
#: Of one module on one number of ranks; many ranks take long on few cores.
SECONDS = 1800


def fetch(folder: Path) -> Path:
    """The tests of the installed mpi4py, from its source package."""
    name = f"mpi4py-{version('mpi4py')}"
    if not (folder / name).exists():
        package = f"mpi4py=={version('mpi4py')}"
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "mpi4py"]
        subprocess.run([*pip, "-d", str(folder), package], check=True)
        with tarfile.open(next(folder.glob(f"{name}.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    return folder / name / "test"


def on_this_rank(tests: Path, module: str, how: str) -> int:
    """Runs one module on all ranks; rank 0 prints how many tests ran, and which ones failed."""
    from mpi4py import MPI

    if how == "ours":
        from collectives import Communicator

        world, alone = Communicator(MPI.COMM_WORLD), Communicator(MPI.COMM_SELF)
        MPI.COMM_WORLD, MPI.COMM_SELF = world, alone  # type: ignore[misc]
    sys.path.insert(0, str(tests))
    if how == "virtual":
        of_each_rank()
    suite = unittest.defaultTestLoader.loadTestsFromName(module)
    if how != "plain" and (of_topologies := getattr(sys.modules[module], "BaseTestTopo", None)):
        # It asks MPI.Comm for the class of a handle, which knows those of mpi4py.
        of_topologies.checkHandle = lambda test, comm: None
    with open(os.devnull, "w") as quiet:
        result = unittest.TextTestRunner(stream=quiet).run(suite)
    failed = {str(test): why for test, why in [*result.failures, *result.errors]}
    everywhere = MPI.COMM_WORLD.gather(failed)
    if everywhere is not None:
        merged = {test: why for own in everywhere for test, why in own.items()}
        print(json.dumps([result.testsRun, merged]), flush=True)
    return 0


def of_each_rank() -> None:
    """Gives each thread a state of its own where the tests keep theirs in a function."""
    import arrayimpl  # type: ignore[import-not-found]

    class Loop(threading.local):
        __call__ = staticmethod(arrayimpl.loop)

    if not isinstance(arrayimpl.loop, threading.local):
        arrayimpl.loop = Loop()


def run(tests: Path, module: str, size: int, how: str) -> tuple[int, dict[str, str]]:
    """How many tests ran on each of ``size`` ranks, and what failed, with its traceback."""
    launcher = os.environ.get("MPIEXEC", "mpiexec")
    command = [launcher, "-n", str(size), sys.executable, "-m"]
    if how == "virtual":
        command = [sys.executable, "-m", "collectives.virtual", "-n", str(size), __file__]
    elif how != "ours" and how != "plain":
        command += ["collectives", *how.split(), "-m"]
    command += [] if how == "virtual" else ["tests.conformance"]
    command += ["--tests", str(tests), "--module", module, "--how", how]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        ran, failed = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return 0, {module: f"did not end in {SECONDS} s"}
    except (IndexError, ValueError):
        return 0, {module: f"ended with {done.returncode}: {done.stderr[-2000:]}"}
    return ran, failed


def main() -> int:
    """Prints a table; 1 if a test fails that plain mpi4py passes, which is run where ours fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--sizes", default="1,2,3,4,5,7,8", help="numbers of ranks")
    parser.add_argument("--modules", default=MODULES, help="without test_; default: all")
    parser.add_argument("--tests", type=Path, help="mpi4py's folder of tests; default: fetched")
    parser.add_argument("--module", help=argparse.SUPPRESS)
    parser.add_argument(
        "--how",
        default="ours",
        help="ours in the place of the constants; or 'run', 'run --profile=/tmp/conformance/run': "
        "as unchanged programs; virtual: on virtual ranks; or plain",
    )
    options = parser.parse_args()
    if options.module:
        return on_this_rank(options.tests, options.module, options.how)
    folder = Path(tempfile.gettempdir()) / "conformance"
    folder.mkdir(exist_ok=True)
    try:
        tests = options.tests or fetch(folder)
    except subprocess.CalledProcessError:
        print(f"skipped: pip finds no source package of mpi4py {version('mpi4py')}")
        return 0
    worse = 0
    print(
        "| module | ranks | tests | failed, ours | failed, plain mpi4py |\n| --- | " + "---: | " * 4
    )
    for name in options.modules.split(","):
        module = f"test_{name.removeprefix('test_')}"
        for size in map(int, options.sizes.split(",")):
            ran, failed = run(tests, module, size, options.how)
            for test in OF_CONSTANTS if options.how == "ours" else ():
                failed.pop(test, None)
            known = run(tests, module, size, "plain")[1] if failed else None
            plain = "-" if known is None else len(known)
            print(f"| {module} | {size} | {ran} | {len(failed)} | {plain} |", flush=True)
            for test in failed.keys() - (known or {}).keys():
                worse += 1
                print(f"{test}:\n{failed[test]}", file=sys.stderr, flush=True)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
