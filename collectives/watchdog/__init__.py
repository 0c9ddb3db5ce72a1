"""Who waits for whom, when a job hangs: opt-in, and without a price where it is off."""

from collectives.watchdog.monitor import Watchdog, Watched, report_calls

__all__ = ["Watchdog", "Watched", "report_calls"]
