"""Checks of user code: modules, losses and metrics run in a probe, and results are compared."""
