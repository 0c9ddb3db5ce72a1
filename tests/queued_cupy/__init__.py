"""CuPy's names on memory of the host, where work is queued and done as late as is allowed.

Arrays and functions are those of :mod:`tests.strict_cupy`; their kernels go to a queue here.

    cupy = queued_cupy.install(monkeypatch, Machine(devices=2))
    ...
    cupy.machine.expect_no_races()

Code for a GPU runs where there is none.  Code that does not wait for the GPU where it must computes
other numbers, or is found in ``machine.races``.  :class:`Recorded` tells the machine what MPI reads
and writes.
"""

import sys

from tests.queued_cupy import nccl
from tests.queued_cupy.machine import Machine, Race, Range
from tests.queued_cupy.messages import Recorded, RecordedLocal, RecordedTransport
from tests.queued_cupy.runtime import Runtime, modules
from tests.strict_cupy import counts

__all__ = ["Machine", "Race", "Range", "Recorded", "RecordedLocal", "RecordedTransport", "install"]


def install(patch, machine=None):
    """Puts ``cupy`` into ``sys.modules``, until ``patch`` takes it away; returns it."""
    runtime = Runtime(machine or Machine())
    made = modules(runtime, nccl.module(runtime))
    for name, module in made.items():
        patch.setitem(sys.modules, name, module)
    patch.setattr(counts, "backend", runtime)
    cupy = made["cupy"]
    cupy.machine, cupy.queued = runtime.machine, runtime
    return cupy
