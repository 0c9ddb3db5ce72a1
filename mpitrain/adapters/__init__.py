"""Stages made of other libraries' modules."""
