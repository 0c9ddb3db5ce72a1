"""Drills: faults that are tried out on a job before they happen.

A *fault* is one thing that goes wrong (:mod:`.faults`); some happen inside a rank (:mod:`.inject`),
others around the job (:mod:`.outside`).  A *drill* runs a job with a fault, resumes it, and judges
both (:mod:`.drill`).
"""

from tests.drills.faults import KINDS, Fault, draw, parse

__all__ = ["KINDS", "Fault", "draw", "parse"]
