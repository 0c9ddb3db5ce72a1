"""MPI's collective methods in their three forms."""

from collectives.methods.blocking import Blocking
from collectives.methods.nonblocking import Nonblocking
from collectives.methods.persistent import Persistent

__all__ = ["Blocking", "Nonblocking", "Persistent"]
