"""Drills: a job is run with a fault, inside a rank or around the job, resumed, and judged."""

from tests.drills.faults import KINDS, Fault, draw, parse

__all__ = ["KINDS", "Fault", "draw", "parse"]
