"""Faults that somebody could make, and whether the tests would notice."""
