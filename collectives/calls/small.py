"""Below how many bytes whatever we did first would take longer than the MPI library's own
collective."""

from collectives.calls.library import library
from collectives.calls.resources import Resources
from collectives.calls.tuner import ATTACHED_BYTES
from collectives.calls.turns import TURNS_BYTES
from collectives.contracts import contract


class Limits(dict[str, int]):
    """For each collective, the bytes below which a call without ``algorithm`` is native; 0 where
    something is to be done with each call.

    A dictionary, as an all-reduce of 8 bytes takes less than ten Python calls.
    """

    def __init__(self, resources: Resources) -> None:
        self.resources = resources

    def __missing__(self, collective: str) -> int:
        settings = self.resources.settings
        auto = settings.algorithm == "auto" and not settings.check and not settings.timeout
        auto = auto and not settings.needs_messages
        auto = auto and not (settings.reproducible and contract(collective).reduces)
        self[collective] = self.of_auto(collective) if auto else 0
        return self[collective]

    def of_auto(self, collective: str) -> int:
        """The bytes below which ``auto`` is native.  Collective at its first use."""
        resources, settings = self.resources, self.resources.settings
        per_node, table = resources.facts
        below = table.native_below(library(), collective, resources.comm.size, per_node)
        if settings.attach:
            below = min(below, ATTACHED_BYTES)
        return min(below, TURNS_BYTES) if settings.turns else below
