"""How far sums are from the exact ones."""

import numpy as np

from benchmarks.rounding import disagreement, main, measure


def columns(*numbers):
    """One rank's array for each, of one item."""
    return [np.array([number], np.float32) for number in numbers]


def test_last_places_are_counted():
    """1 + 2^-24 + 2^-24: from the left both are lost, and from the right none."""
    (found,) = measure(["direct"], columns(1, 2**-24, 2**-24))
    assert found.total == 1
    assert (found.largest, found.mean, found.right) == (1, 1.0, 0.0)
    (found,) = measure(["direct"], columns(2**-24, 2**-24, 1))
    assert (found.largest, found.mean, found.right) == (0, 0.0, 1.0)


def test_last_places_are_counted_across_zero():
    (found,) = measure(["direct"], columns(1, 2**-24, -1))
    tiny = int(np.float32(2**-24).view(np.int32))
    assert found.total == 0
    assert found.largest == tiny


def test_algorithms_that_are_not_for_so_many_ranks_are_left_out():
    found = [*measure(["ring", "parameter_server:servers=9", "butterfly"], columns(1, 2, 3))]
    assert [one.algorithm for one in found] == ["ring", "butterfly"]
    assert disagreement(found) == 0


def test_the_command(capsys):
    assert main(["-n", "5", "--count", "2000", "-d", "double"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[3:-1]}
    assert {"ring", "double_binary_tree", "butterfly", "direct"} <= rows.keys()
    assert all(0 < float(mean) <= int(largest) for largest, mean, _ in rows.values())
    assert 0 < float(lines[-1].split()[-4].rstrip("%")) <= 100
