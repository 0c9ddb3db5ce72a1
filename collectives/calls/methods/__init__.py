"""MPI's collective methods in their three forms, and those that wait for a single message."""

from collectives.calls.methods.blocking import Blocking
from collectives.calls.methods.nonblocking import Nonblocking
from collectives.calls.methods.persistent import Persistent
from collectives.calls.methods.point_to_point import PointToPoint

__all__ = ["Blocking", "Nonblocking", "Persistent", "PointToPoint"]
