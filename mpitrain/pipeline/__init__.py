"""Pipelines: schedules of passes, what they cost, and the runtime that carries them out."""
