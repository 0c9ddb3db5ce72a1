"""Failing jobs: their end, the watchdog that names who is missing, a history of calls.

``docs/failures.md`` says what happens when a rank dies.
"""

from collectives.failure.abort import aborts, end_job, note_shared
from collectives.failure.processes import find
from collectives.failure.watchdog import Watchdog, report_calls
from collectives.failure.watched_plan import WatchedPlan

__all__ = ["Watchdog", "WatchedPlan", "aborts", "end_job", "find", "note_shared", "report_calls"]
