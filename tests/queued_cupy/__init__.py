"""CuPy's names on memory of the host: strict about what CuPy refuses, and as late as is allowed.

Arrays of a class of their own refuse what CuPy refuses: NumPy's arrays beside them, a conversion
that nobody asked for, parameters that CuPy does not have, arrays of another device.  Every kernel
and every time that the host waits is counted (``counts.py``).

    cupy = queued_cupy.install(monkeypatch, Machine(devices=2))
    ...
    cupy.machine.expect_no_races()

Code for a GPU runs where there is none.  Code that does not wait for the GPU where it must computes
other numbers, or is found in ``machine.races``.  :class:`Recorded` tells the machine what MPI reads
and writes.
"""

import sys

from tests.queued_cupy import nccl
from tests.queued_cupy.counts import counts
from tests.queued_cupy.machine import Machine
from tests.queued_cupy.messages import Recorded, RecordedLocal, RecordedTransport
from tests.queued_cupy.runtime import Runtime, modules

__all__ = ["Machine", "Recorded", "RecordedLocal", "RecordedTransport", "install"]


def install(patch, machine=None):
    """Puts ``cupy`` into ``sys.modules``, until ``patch`` takes it away; returns it."""
    counts.reset()
    runtime = Runtime(machine or Machine())
    made = modules(runtime, nccl.module(runtime))
    for name, module in made.items():
        patch.setitem(sys.modules, name, module)
    patch.setattr(counts, "backend", runtime)
    cupy = made["cupy"]
    cupy.machine, cupy.queued = runtime.machine, runtime
    return cupy
