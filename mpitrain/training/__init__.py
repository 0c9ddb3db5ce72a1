"""A job at work: what it is made of on these ranks, its steps, its tests."""
