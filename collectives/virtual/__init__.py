"""Ranks that are threads of one process, on the clock of a modelled network: no launcher.

``python -m collectives.virtual -n 8 program.py`` runs a program of mpi4py; ``mpitrain train
--virtual 8`` a job.  Importing this package starts no MPI.
"""

from collectives.virtual.cluster import VirtualCluster
from collectives.virtual.generators import copy_own, remembered, script
from collectives.virtual.install import end_process, install
from collectives.virtual.rank import Deadlock, here

__all__ = [
    "Deadlock", "VirtualCluster", "copy_own", "end_process", "here", "install", "remembered",
    "script",
]  # fmt: skip
