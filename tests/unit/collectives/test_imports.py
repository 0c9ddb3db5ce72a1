"""Who may import whom, and what importing costs."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
COLLECTIVES = ROOT / "collectives"
#: Code of what a schedule is, means and does needs no MPI; the transports bring it.
LANGUAGE = [COLLECTIVES / name for name in ("schedule.py", "contracts.py", "errors.py")]
WINGS = [COLLECTIVES / name for name in ("algorithms", "analysis", "compile", "execution")]
PURE_FILES = LANGUAGE + sorted(path for wing in WINGS for path in wing.glob("*.py"))


def imported(path, top_level_only=False):
    """Top-level packages that a file imports, by reading it."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


def test_schedules_need_no_mpi_and_no_gpu():
    bringing = {"mpi4py", "cupy", "torch", "mpitrain"}
    assert not [path for path in PURE_FILES if imported(path) & bringing]


def test_one_direction_and_no_heavy_imports():
    for path in COLLECTIVES.rglob("*.py"):
        assert "mpitrain" not in imported(path), path
        heavy = {"matplotlib", "cupy", "torch", "ml_dtypes"}
        if path.parent.name == "torch" and path.name not in ("__init__.py", "register.py"):
            heavy -= {"torch"}  # torch's backend, which only torch imports
        assert not imported(path, top_level_only=True) & heavy, path


def test_importing_brings_no_mpi_and_no_gpu():
    """Neither the package and its commands do, nor what those files import."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PURE_FILES]
    commands = ("bench", "explore", "models", "schedules", "tune")
    names += ["collectives.__main__", *(f"collectives.commands.{name}" for name in commands)]
    done = in_a_process(
        "import sys; from importlib import import_module\n"
        f"for name in {names}:\n"
        "    import_module(name.removesuffix('.__init__'))\n"
        "    for found in {'mpi4py', 'cupy', 'torch', 'matplotlib'} & set(sys.modules):\n"
        "        sys.exit(f'{name} imports {found}')"
    )
    assert (done.returncode, done.stderr) == (0, "")


def in_a_process(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_programs_that_start_mpi_themselves_import_everything_first():
    done = in_a_process("""
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import collectives, mpitrain
for package in (collectives, mpitrain):
    for name in package.__all__:
        getattr(package, name)
assert not MPI.Is_initialized()
MPI.Init_thread()
collectives.Communicator(MPI.COMM_WORLD).Barrier()
MPI.Finalize()
""")
    assert (done.returncode, done.stderr) == (0, "")


#: Folders and modules from the ground up: each imports only what is on its floor or below it.
FLOORS = (
    {"clocks", "codec", "environment", "errors", "extras", "files"},
    {"about", "contracts", "launchers"},
    {"failure", "schedule"},
    {"algorithms"},
    {"compile"},
    {"analysis"},
    {"execution"},
    {"calls"},
    {"coded", "communicator", "phased", "shared_pool", "sparse", "sparse_sums", "sparse_vectors",
     "topologies"},
    {"run"},
    {"torch"},
    {"bench", "commands", "virtual"},
    {"__init__", "__main__"},
)  # fmt: skip
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path):
    return path.relative_to(COLLECTIVES).parts[0].removesuffix(".py")


def test_no_arrow_runs_up():
    for path in COLLECTIVES.rglob("*.py"):
        modules = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name != "__version__"
        }
        rooms = {name.split(".")[1] for name in modules if name.startswith("collectives.")}
        assert not {r for r in rooms if FLOOR_OF[r] > FLOOR_OF[room_of(path)]}, path
