"""Who waits for whom, when a job hangs: opt-in, and without a price where it is off."""

from collectives.failure.monitor import Watchdog, report_calls
from collectives.failure.watched import Watched

__all__ = ["Watchdog", "Watched", "report_calls"]
