"""Drawn calls over buffers of every kind, each beside plain mpi4py's on copies.

    mpiexec -n 3 python -m tests.soak --seconds 3600 --seed 1

All ranks draw the same calls from one generator (:mod:`.calls`), on buffers that are new, dropped,
resized, retyped, moved and used again (:mod:`.kinds`); :mod:`.run` compares the results.
"""

from tests.soak.run import Report, Soak

__all__ = ["Report", "Soak"]
