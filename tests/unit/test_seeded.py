"""The faults of ``tests/seeded`` still fit the code."""

from pathlib import Path

import pytest

from tests.seeded.faults import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place(fault):
    text = (ROOT / fault.path).read_text()
    assert text.count(fault.old) == 1
    assert (ROOT / fault.near).is_file()
    if fault.path.endswith(".py"):
        compile(text.replace(fault.old, fault.new), fault.path, "exec")
