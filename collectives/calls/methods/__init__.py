"""MPI's collective methods in their three forms, those for objects, those that wait for a single
message or for several plans, and those that make other communicators."""

from collectives.calls.methods.blocking import Blocking
from collectives.calls.methods.constructors import Constructors
from collectives.calls.methods.nonblocking import Nonblocking
from collectives.calls.methods.objects import Objects
from collectives.calls.methods.persistent import Persistent
from collectives.calls.methods.point_to_point import PointToPoint
from collectives.calls.methods.requests import Requests

__all__ = [
    "Blocking",
    "Constructors",
    "Nonblocking",
    "Objects",
    "Persistent",
    "PointToPoint",
    "Requests",
]
