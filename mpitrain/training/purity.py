"""Faults that a program's own layers and functions show in their passes, told on all ranks."""

from typing import TYPE_CHECKING

from mpitrain.config import ConfigError
from mpitrain.ranks.together import together

if TYPE_CHECKING:
    from mpitrain.training.parts import Parts
    from mpitrain.training.passes import Passes


class Purity:
    """Watches a program's own layers, loss and metrics on this rank.

    Attributes:
        fault: a fault of these together; None: nobody has seen one.
    """

    fault: ConfigError | None = None

    def __init__(self, parts: "Parts") -> None:
        model = parts.model
        self._comm = parts.comm
        # All ranks know all layers, so that this is the same on all of them.
        self._is_tried = any(verdict.compares for verdict in model.verdicts())
        self._verdicts = [one for name in parts.layers for one in model.layers[name].verdicts()]
        steps = getattr(parts.objects.optimizer, "verdict", None)
        self._functions = [model.loss, *parts.metrics.values(), steps]

    def examine(self, passes: "Passes") -> None:
        """Take two samples through all layers if ranks must compare their shares; collective.

        ConfigError on all ranks: together they compute something else than one process.
        """
        if self._is_tried:
            passes.through()
        for verdict in self._verdicts:
            verdict.deferred, verdict.fault = True, None  # layers may come from another job

    def faults(self) -> list[ValueError]:
        """The first fault of each of this rank's layers and functions, if it has any."""
        found = [self.fault, *(verdict.fault for verdict in self._verdicts)]
        found += [getattr(own, "fault", None) for own in self._functions]
        return [fault for fault in found if fault]

    def expect(self, when: str = "") -> None:
        """Raise ConfigError on all ranks if one has seen a fault; collective.

        ``when`` begins the message, such as ``"step 7"``.
        """

        def act() -> None:
            for fault in self.faults():
                kind = type(fault) if isinstance(fault, ConfigError) else ConfigError
                raise kind(f"{when}: {fault}" if when else str(fault))

        try:
            together(self._comm, act, ConfigError)
        finally:
            self.fault = None
