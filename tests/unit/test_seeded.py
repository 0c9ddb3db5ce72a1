"""The faults of ``tests/seeded`` and ``tests/queued_cupy`` still fit the code."""

from tests.queued_cupy.mutants import ALONE, ON_RANKS
from tests.seeded.__main__ import FAULTS
from tests.seeded.fault import ROOT


def test_a_fault_has_one_place():
    for fault in (*FAULTS, *ALONE, *ON_RANKS):
        text = fault.text()
        if fault.path.endswith(".py"):
            compile(text, fault.path, "exec")
    for fault in FAULTS:
        assert (ROOT / fault.near).is_file(), fault.name
