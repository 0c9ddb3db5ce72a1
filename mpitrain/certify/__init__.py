"""Comparison of a program in several layouts with one process that trains the whole batch."""
