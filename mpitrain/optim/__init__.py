"""Optimisers, groups of parameters, and learning rates over time."""
