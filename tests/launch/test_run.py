"""Programs of mpi4py that ``python -m collectives run`` runs unchanged, and their profiles."""

import json
from collections import Counter

import pytest

from tests.cases import mostly_slow, slow_case
from tests.launch.programs import needs_launcher, run

pytestmark = needs_launcher
#: A program that knows nothing of us, and takes mpi4py at its word; drawn_mpi_program.py has more.
PROGRAM = """
import atexit, copy, os, pickle, sys
import mpi4py
mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI
import mpi4py.MPI
import numpy as np

world = MPI.COMM_WORLD
assert MPI.Query_thread() >= MPI.THREAD_SERIALIZED
assert world is mpi4py.MPI.COMM_WORLD and type(world).__module__ == "mpi4py.MPI"
assert any("collectives" in kind.__module__ for kind in type(world).__mro__) == OURS
assert pickle.loads(pickle.dumps(world)) is world and copy.copy(world) is world
assert MPI.Comm.Compare(world, MPI.Intracomm(world)) == MPI.IDENT
grid = world.Create_cart([world.size], periods=[True])
assert isinstance(grid, MPI.Cartcomm) and isinstance(grid.Sub([True]), MPI.Cartcomm)

total = np.ones(50_000)
for comm in (world, grid, world.Dup()):
    comm.Allreduce(MPI.IN_PLACE, total)
assert (total == float(world.size) ** 3).all()

left, right = grid.Shift(0, 1)
came, one = np.empty(4), np.empty(1)
persistent = [world.Send_init(total, right), world.Recv_init(came_again := total.copy(), left)]
persistent.append(world.Allreduce_init(np.ones(1), one))
for _ in range(3):
    MPI.Prequest.Startall(persistent)
    MPI.Request.Waitall(persistent)
for each in persistent:
    each.Free()
request = world.isend("object", right)
for handle in (request.handle, MPI.REQUEST_NULL.handle):
    assert type(MPI.Request.fromhandle(handle)) is type(request) is MPI.Request
assert copy.copy(MPI.REQUEST_NULL) is MPI.REQUEST_NULL and type(MPI.REQUEST_NULL) is MPI.Request
assert type(pickle.loads(pickle.dumps(MPI.Request()))) is MPI.Request
assert world.recv(source=MPI.ANY_SOURCE) == "object"
request.wait()
there = [world.Irecv(came, left), world.Isend(np.full(4, 5.0), right)]
while there:
    done = MPI.Request.Waitsome(there)
    there = [one for one in there if one]

class Own(MPI.Intracomm):
    pass
own = Own(world)
assert own.allreduce(1) == world.size
between = world.Create_group(world.group).Split(world.rank % 2)
if world.size > 1:
    inter = between.Create_intercomm(0, world, 1 - world.rank % 2)
    assert inter.Merge().size == world.size
grid.Free()
assert os.path.isabs(__file__)
atexit.register(lambda: pickle.loads(pickle.dumps(Own)))  # of a module that is still there
print("done", *sys.argv, __name__, world.rank)
"""


@pytest.mark.parametrize(
    "options", [*map(slow_case, (None, [], ["--gains"])), ["--profile"]], ids=str
)
def test_an_unchanged_program_sees_mpi4py(tmp_path, options):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("OURS", str(options is not None)))
    way = [] if options is None else ["-m", "collectives", "run", *options]
    done = run(tmp_path, *way, program.name, "--gains", "3", ranks=2)
    assert done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr
    assert sorted(done.stdout.split("\n")[:2]) == [
        f"done {program.name} --gains 3 __main__ {rank}" for rank in range(2)
    ]
    if options == ["--gains"]:
        assert "Allreduce at program.py:20: " in done.stderr
    if options == ["--profile"]:
        assert done.stderr.count("computing  communicating  waiting") == 1
        assert "Waitsome at program.py:41" in done.stderr


ENDS = """
import sys
import mpi4py
mpi4py.rc.initialize = {initialize}
from mpi4py import MPI
if not MPI.Is_initialized():
    MPI.Init()
world = MPI.COMM_WORLD
rank = world.rank
world.Barrier()
{then}
world.Barrier()
if not {initialize}:
    MPI.Finalize()
"""


#: Whether mpi4py starts MPI, or the program does; how it ends, its status, and what is said.
WAYS = [
    (True, "if rank: raise FileNotFoundError(2, 'it is gone', 'name')", 1, "it is gone: 'name'"),
    (False, "if rank: sys.exit(3)", 3, ""),
    (True, "if rank: raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    (False, "MPI.Finalize(); sys.exit(4 * rank)", 4, ""),
    (True, "import threading; t = threading.Thread(target=list, args=(1,)); t.start(); t.join()", 0,
     "not iterable"),
]  # fmt: skip


@pytest.mark.parametrize(("initialize", "then", "status", "said"), mostly_slow(WAYS, WAYS[:2]))
def test_the_exit_status_is_that_of_the_program(tmp_path, initialize, then, status, said):
    (tmp_path / "ends.py").write_text(ENDS.format(then=then, initialize=initialize))
    words = ["-m", "collectives", "run", "--profile", "-m", "ends"]
    done = run(tmp_path, *words, ranks=2)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    whole = status in (0, 4)
    assert (tmp_path / "profile.html").exists() == whole


#: In each of eight steps, rank 1 or rank 0 lets the others wait.
FAULTS = {
    "data": """
    items = 2000 if rank == 1 else 1000
    work(items * 4e-5)
    counts = [1000 + 1000 * (each == 1) for each in range(world.size)]
    world.Allgatherv(np.ones(items), [np.empty(sum(counts)), counts])""",
    "serial": "work(0.005); world.Barrier(); work(0 if rank else 0.06); world.bcast(step)",
    # Receives from any rank, and one of another tag that stays open.
    "sender": """
    work(0 if rank else 0.06)
    one, last = np.ones(1), step == 7
    if rank == 0:
        world.Send(one, 1, 3)
        last and world.Send(one, 1, 9)
    elif rank == 1:
        stop = stop if step else world.Irecv(np.ones(1), 0, 9)
        world.Recv(one, 0, 3) if step % 2 else world.Irecv(one, tag=3).Wait()
        last and stop.Wait()""",
    "persistent": """
    work(0 if rank else 0.06)
    if rank == 1:
        own = [world.Recv_init(np.ones(1), 0)] if not step else own
        own[0].Start()
        MPI.Request.Waitany(own)
    elif rank == 0:
        world.Send(np.ones(1), 1)""",
}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("data", "Rank 1 has 2.0 times as much data as the others in Allgatherv at planted.py:"),
        slow_case(*("serial", "Rank 0 works alone, a serial section: ")),
        ("sender", "Rank 0 sends late: rank 1 waits "),
        slow_case(*("persistent", "Rank 0 sends late: rank 1 waits ")),
    ],
)
def test_the_first_line_of_a_profile_names_the_fault(tmp_path, fault, said):
    (tmp_path / "planted.py").write_text(
        "from time import sleep as work\nimport numpy as np\nfrom mpi4py import MPI\n"
        "world = MPI.COMM_WORLD\nrank = world.rank\n"
        f"for step in range(8):\n    {FAULTS[fault].lstrip()}\n"
    )
    words = ["-m", "collectives", "run", "--profile=found", "planted.py"]
    done = run(tmp_path, *words, ranks=3)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr, done.stderr
    assert said in (tmp_path / "found.html").read_text()
    events = json.loads((tmp_path / "found.json").read_text())["traceEvents"]
    waits = Counter()
    for event in events:
        waits[event["name"]] += event.get("dur", 0) * (event.get("cat") == "waiting")
    assert waits.most_common(1)[0][0] == f"waits for rank {said.split()[1]}"
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert rows == {rank: f"rank {rank}" for rank in range(3)}
