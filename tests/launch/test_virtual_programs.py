"""Drawn programs of mpi4py do the same on virtual ranks and on MPI's."""

import pytest

from tests.launch import programs
from tests.launch.programs import needs_launcher, scratch

PROGRAM = programs.ROOT / "tests" / "launch" / "drawn_mpi_program.py"
#: Ranks, and the first draw and the one behind the last.
DRAWS = [
    (3, 0, 40),
    *(pytest.param(size, 100, 200, marks=pytest.mark.slow) for size in (2, 3, 4, 5)),
]


@scratch
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
