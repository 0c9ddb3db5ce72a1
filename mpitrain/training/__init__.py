"""A running job: its parts on each rank, its training steps and its tests."""
