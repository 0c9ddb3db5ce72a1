"""Failing jobs: their end, the watchdog that names who is missing, a history of calls.

``docs/failures.md`` says what happens when a rank dies.
"""

from collectives.failure.watchdog import Watchdog, report_calls
from collectives.failure.watched import Watched

__all__ = ["Watchdog", "Watched", "report_calls"]
