"""Comparisons with other trainers."""
