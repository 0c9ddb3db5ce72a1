"""Failing jobs: their end, the watchdog that names who is missing, a history of calls.

``docs/failures.md`` says what happens when a rank dies.
"""

from collectives.failure.abort import aborts, end_job, note_shared
from collectives.failure.processes import find

__all__ = ["aborts", "end_job", "find", "note_shared"]
