"""MPI's collective methods in their three forms, those for objects, those that wait for a single
message or for several plans, and those that make other communicators."""

from collectives.calls.methods.blocking import Blocking
from collectives.calls.methods.constructors import Constructors
from collectives.calls.methods.derived import Nonblocking, Persistent
from collectives.calls.methods.objects import Objects
from collectives.calls.methods.point_to_point import PointToPoint, Requests

__all__ = [
    "Blocking",
    "Constructors",
    "Nonblocking",
    "Objects",
    "Persistent",
    "PointToPoint",
    "Requests",
]
