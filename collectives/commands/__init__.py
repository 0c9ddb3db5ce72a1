"""The commands of ``python -m collectives``."""
