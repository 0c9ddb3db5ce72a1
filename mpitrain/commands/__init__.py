"""The commands of ``python -m mpitrain``."""
