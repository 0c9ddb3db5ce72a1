"""Who waits for whom, when a job hangs: opt-in, and without a price where it is off."""

from collectives.watchdog.monitor import Watchdog, report_calls
from collectives.watchdog.watched import Watched

__all__ = ["Watchdog", "Watched", "report_calls"]
