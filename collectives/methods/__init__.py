"""MPI's collective methods in their three forms, and those that wait for a single message."""

from collectives.methods.blocking import Blocking
from collectives.methods.nonblocking import Nonblocking
from collectives.methods.persistent import Persistent
from collectives.methods.point_to_point import PointToPoint

__all__ = ["Blocking", "Nonblocking", "Persistent", "PointToPoint"]
