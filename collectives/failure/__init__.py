"""Failing jobs: their end, the watchdog that names who is missing, a history of calls.

``docs/failures.md`` says what happens when a rank dies.
"""
