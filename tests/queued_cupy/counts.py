"""Counts of a program's kernels, synchronisations of the host and copies to it."""

import sys
from collections import Counter
from pathlib import Path

_HERE = Path(__file__).parent
_ROOT = Path(__file__).parents[2]


class Counts:
    """Since the last :meth:`reset`.

    Attributes:
        kernels: launched, by the operation's name.
        syncs: times that the host waited for the device, by (why, "file.py:line").
        broadcast_matmuls: products of arrays of unequally many axes, by "file.py:line": CuPy copies
            both operands for them, and multiplies matrix by matrix.
        allowed: whether the host may wait.
        backend: what queues the work, of the machine that is installed.
    """

    def __init__(self):
        self.allowed = True
        self.backend = None
        self.reset()

    def reset(self):
        self.kernels = Counter()
        self.syncs = Counter()
        self.broadcast_matmuls = Counter()

    @property
    def launched(self):
        """All kernels."""
        return self.kernels.total()

    @property
    def waited(self):
        """All synchronisations of the host."""
        return self.syncs.total()

    def kernel(self, name, count=1):
        self.kernels[name] += count

    def sync(self, why):
        """As ``cupyx.allow_synchronize(False)`` has it, none may be allowed."""
        if not self.allowed:
            raise RuntimeError(f"DeviceSynchronized: {why} at {caller()}")
        self.syncs[why, caller()] += 1


def caller():
    """Where the program is that called the stand-in, as ``mpitrain/update/updater.py:12``."""
    frame = sys._getframe(1)
    while frame and Path(frame.f_code.co_filename).parent == _HERE:
        frame = frame.f_back
    if frame is None:
        return "?"
    path = Path(frame.f_code.co_filename)
    own = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path.name
    return f"{own}:{frame.f_lineno}"


#: One process, one count.
counts = Counts()
