"""The faults of ``tests/seeded`` still fit the code."""

from pathlib import Path

from tests.seeded.faults import FAULTS

ROOT = Path(__file__).parents[2]


def test_a_fault_has_one_place():
    for fault in FAULTS:
        text = (ROOT / fault.path).read_text()
        assert text.count(fault.old) == 1, fault.name
        assert (ROOT / fault.near).is_file(), fault.name
        if fault.path.endswith(".py"):
            compile(text.replace(fault.old, fault.new), fault.path, "exec")
