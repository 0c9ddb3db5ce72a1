"""Below how many bytes whatever we did first would take longer than the MPI library's own
collective."""

from collectives.calls.autotune import TURNS_BYTES
from collectives.calls.library import COUNTABLE, library
from collectives.calls.resources import Resources
from collectives.calls.tuner import NEVER, ORDINARY, SHARED
from collectives.contracts import contract
from collectives.execution.progress import Underway


class Limits(dict[str, int]):
    """For each collective, the bytes below which a call without ``algorithm`` is native; 0 where
    something is to be done with each call.

    A dictionary, as an all-reduce of 8 bytes takes less than ten Python calls.

    Args:
        unequal: of the v-variants: as few ranks know how long the others' blocks are, they are
            native whatever their length, or something is to be done with each call.
    """

    def __init__(self, resources: Resources, underway: Underway, unequal: bool = False) -> None:
        self.resources = resources
        self.underway = underway
        self.unequal = unequal

    def __missing__(self, collective: str) -> int:
        settings = self.resources.settings
        auto = settings.algorithm == "auto" and not settings.check and not settings.timeout
        auto = auto and not settings.needs_messages
        auto = auto and not (settings.reproducible and contract(collective).reduces)
        below = self.of_auto(collective) if auto else 0
        if (self.unequal and below < NEVER) or self.underway.traffic is not None:
            below = 0
        self[collective] = min(below, COUNTABLE)
        return self[collective]

    def of_auto(self, collective: str) -> int:
        """The bytes below which ``auto`` is native.  Collective at its first use.

        No array lies in memory that the ranks share before one was asked for.
        """
        resources, settings = self.resources, self.resources.settings
        per_node, table = resources.facts
        memories = ORDINARY if resources.node is None or self.unequal else SHARED
        below = table.native_below(library(), collective, resources.comm.size, per_node, memories)
        return min(below, TURNS_BYTES) if settings.turns else below
