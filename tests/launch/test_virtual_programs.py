"""Drawn programs of mpi4py do the same on virtual ranks and on MPI's."""

import pytest

from tests.cases import slow_case
from tests.launch import programs
from tests.launch.programs import needs_launcher

PROGRAM = programs.ROOT / "tests" / "launch" / "drawn_mpi_program.py"
#: Ranks, and the first draw and the one behind the last.
DRAWS = [
    (3, 0, 40),
    *(slow_case(size, 100, 200) for size in (2, 3, 4, 5)),
]


@needs_launcher
@pytest.mark.parametrize(("ranks", "first", "last"), DRAWS)
def test_drawn_programs_of_mpi4py_do_the_same_on_virtual_ranks(tmp_path, ranks, first, last):
    """Each draw has a communicator and four calls: collectives in all forms, messages, requests
    that end in all ways, grids and graphs."""
    found = {}
    for kind, words, size in (
        ("real", (), ranks),
        ("virtual", ("-m", "collectives.virtual", "-n", ranks), None),
    ):
        folder = tmp_path / kind
        folder.mkdir()
        done = programs.run(folder, *words, PROGRAM, folder, first, last, ranks=size, seconds=300)
        found[kind] = [(folder / str(rank)).read_text().splitlines() for rank in range(ranks)]
        assert done.returncode == 0, (found[kind], done.stderr)
    for real, virtual in zip(found["real"], found["virtual"], strict=True):
        assert len(real) == last - first
        assert virtual == real


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


def test_a_profile_of_virtual_ranks_is_that_of_mpi_s(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM_OF_RANKS)
    (tmp_path / "imported_once.py").write_text(
        "import time\ndef work():\n    begun = time.process_time()\n"
        "    while time.process_time() < begun + 0.5: pass\nwork()\nSECONDS = 0.5\n"
    )
    words = ("-m", "collectives.virtual", "-n", 3, "--profile", "program.py")
    done = programs.run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "Rank 2 is slow, it computes " in done.stderr
    assert " Bcast at program.py:15" in done.stderr
    assert "collectives/" not in (tmp_path / "profile.json").read_text()
    assert "Rank 2 is slow" in (tmp_path / "profile.html").read_text()


def test_a_module_that_waits_while_it_is_imported_is_named(tmp_path):
    (tmp_path / "talks.py").write_text("from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n")
    (tmp_path / "program.py").write_text("import talks\n")
    done = programs.run(tmp_path, "-m", "collectives.virtual", "-n", 2, "program.py")
    assert done.returncode == 1
    assert "the module talks waits for other ranks while it is imported, and " in done.stderr


@pytest.mark.parametrize("code", [0, 3])
def test_abort_of_a_rank_ends_all_ranks(tmp_path, code):
    (tmp_path / "program.py").write_text(
        "from mpi4py import MPI\ntry:\n    MPI.COMM_WORLD.rank or MPI.COMM_WORLD.Abort"
        f"({code})\nfinally:\n    print('goes on')\n"
    )
    done = programs.run(tmp_path, "-m", "collectives.virtual", "-n", 2, "program.py")
    assert (done.returncode, done.stdout) == (code, "")
    assert f"virtual rank 0 calls Abort({code}): all end" in done.stderr


def test_a_thread_that_is_no_rank_ends_all_ranks(tmp_path):
    (tmp_path / "program.py").write_text(
        "import threading\nfrom mpi4py import MPI\nend = threading.Event()\n"
        "threading.Thread(target=lambda: end.set(MPI.COMM_WORLD.bcast(1)), daemon=True).start()\n"
        "end.wait()\n"
    )
    done = programs.run(tmp_path, "-m", "collectives.virtual", "-n", 2, "program.py")
    assert done.returncode == 1
    assert "a thread that is no virtual rank calls MPI; start this" in done.stderr
