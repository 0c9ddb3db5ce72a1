"""Checks that a GPU must pass, as one command: ``python -m tests.gpu.verify``."""
