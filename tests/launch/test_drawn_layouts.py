"""Drawn layouts, several axes at a time, train as one process, go on, and move."""

import pytest

from tests.launch import programs

pytestmark = programs.scratch


@pytest.mark.parametrize(
    ("ranks", "rounds"), [(4, 1), *(pytest.param(n, 40, marks=pytest.mark.slow) for n in (2, 8))]
)
def test_drawn_layouts_are_one_process(tmp_path, ranks, rounds):
    script = programs.ROOT / "tests" / "drawn_layouts.py"
    words = ("-m", "collectives.virtual", "-n", ranks, script, "--rounds", rounds)
    done = programs.run(tmp_path, *words, seconds=60 + 40 * rounds)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ranks, round ") == rounds
