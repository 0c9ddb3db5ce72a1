"""All faults."""

from tests.seeded import of_collectives, of_mpitrain

FAULTS = [*of_collectives.FAULTS, *of_mpitrain.FAULTS]
