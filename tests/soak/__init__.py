"""Drawn layouts of the trainer."""
