"""Drawn programs of mpi4py do the same over our communicators, and on virtual ranks."""

import pytest

from tests.cases import slow_case
from tests.launch import programs
from tests.launch.programs import needs_launcher

PROGRAM = programs.ROOT / "tests" / "launch" / "drawn_mpi_program.py"
#: Ranks, and the first draw and the one behind the last.
DRAWS = [(3, 0, 40), *(slow_case(size, 100, 200) for size in (2, 3, 4, 5))]


@needs_launcher
@pytest.mark.parametrize(("ranks", "first", "last"), DRAWS)
def test_drawn_programs_of_mpi4py_do_the_same_over_ours_and_on_virtual_ranks(
    tmp_path, ranks, first, last
):
    """Each draw has a communicator and four calls: collectives in all forms, messages, requests
    that end in all ways, grids and graphs."""
    found = {}
    for kind, words, size in (
        ("real", (), ranks),
        ("ours", ("-m", "collectives", "run"), ranks),
        ("virtual", ("-m", "collectives.virtual", "-n", ranks), None),
    ):
        folder = tmp_path / kind
        folder.mkdir()
        done = programs.run(folder, *words, PROGRAM, folder, first, last, ranks=size, seconds=300)
        found[kind] = [(folder / str(rank)).read_text().splitlines() for rank in range(ranks)]
        assert done.returncode == 0, (found[kind], done.stderr)
    for real, *others in zip(*found.values(), strict=True):
        assert len(real) == last - first
        assert others == [real] * 2


PROGRAM_OF_RANKS = """
import gc, time
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.rank == 1:
    import imported_once
    gc.callbacks.append(lambda phase, _: imported_once.work() if phase == "start" else None)
    gc.collect()
    del gc.callbacks[-1]
    assert time.perf_counter() < imported_once.SECONDS
for step in range(12):
    time.sleep(0.3 if comm.rank == 2 else 0.1)
    comm.Bcast(np.ones(100_000))
    comm.Ireduce(np.ones(9), np.ones(9), root=0).Wait()
"""


def virtual(folder, text, *options, ranks=5):
    before = ("-m", "collectives.virtual", "-n", ranks, *options)
    return programs.run_text(folder, text, before=before, PYTHONUNBUFFERED="")


def test_a_profile_of_virtual_ranks_is_that_of_mpi_s(tmp_path):
    (tmp_path / "imported_once.py").write_text(
        "import time\ndef work():\n    begun = time.process_time()\n"
        "    while time.process_time() < begun + 0.5: pass\nwork()\nSECONDS = 0.5\n"
    )
    done = virtual(tmp_path, PROGRAM_OF_RANKS, "--profile", ranks=3)
    assert done.returncode == 0, done.stderr
    assert "Rank 2 is slow, it computes " in done.stderr
    assert " Bcast at program.py:15" in done.stderr
    assert "collectives/" not in (tmp_path / "profile.json").read_text()
    assert "Rank 2 is slow" in (tmp_path / "profile.html").read_text()


#: Programs on five ranks: exit status, lines of output in any order, what is said, text.
ENDS = {
    "ranks that wait for one another": (
        1, [f"{rank} 15.0 15.0" for rank in range(5)],
        ["program.py", *(f"rank {rank}" for rank in range(5))], """
from mpi4py import MPI
from collectives import Communicator
import numpy as np
comm = Communicator(MPI.COMM_WORLD)
total = np.empty(1000)
comm.Allreduce(np.full(1000, comm.rank + 1.0), total, algorithm="ring")
print(comm.rank, total[0], total[-1])
MPI.COMM_WORLD.recv(source=(comm.rank + 1) % comm.size)
"""),
    "classes, clocks and an end of its own": (0, ["True 4 [5, 5, 5, 5]"] * 5, ["waiting"], """
from dataclasses import dataclass
from mpi4py import MPI
import sys, time

@dataclass
class Own:
    rank: int

def main():
    comm, clocks = MPI.COMM_WORLD, (MPI.Wtime, time.perf_counter, time.monotonic)
    begun = [clock() for clock in clocks] + [1e-9 * time.perf_counter_ns()]
    time.sleep(500)
    last = comm.bcast(Own(comm.rank), root=comm.size - 1)
    took = [clock() for clock in clocks] + [1e-9 * time.perf_counter_ns()]
    print(isinstance(last, Own), last.rank, [round((b - a) / 100) for a, b in zip(begun, took)])
    MPI.Finalize()
    return 0

sys.exit(main())
"""),
    **{
        f"Abort({code})": (code, [], [f"virtual rank 0 calls Abort({code}): all end"], f"""
from mpi4py import MPI
try:
    MPI.COMM_WORLD.rank or MPI.COMM_WORLD.Abort({code})
finally:
    print("goes on")
""")
        for code in (0, 3)
    },
    "a module that waits": (
        1, [], ["the module talks waits for other ranks while it is imported, and "], """
open("talks.py", "w").write("from mpi4py import MPI\\nMPI.COMM_WORLD.Barrier()\\n")
import talks
"""),
    "a thread that is no rank": (
        1, [], ["a thread that is no virtual rank calls MPI; start this"], """
import threading
from mpi4py import MPI
end = threading.Event()
threading.Thread(target=lambda: end.set(MPI.COMM_WORLD.bcast(1)), daemon=True).start()
end.wait()
"""),
}  # fmt: skip


@pytest.mark.parametrize("what", ENDS)
def test_a_program_ends_with_its_status_and_its_output(tmp_path, what):
    status, output, said, text = ENDS[what]
    done = virtual(tmp_path, text)
    assert done.returncode == status, done.stderr
    assert sorted(done.stdout.splitlines()) == output
    assert all(words in done.stderr for words in said), done.stderr
