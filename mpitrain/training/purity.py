"""Whether what a program brings behaves as pure functions do: tried once, watched ever after."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from mpi4py import MPI

from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.data import DataError
from mpitrain.nn import Layer
from mpitrain.objective import LossFunction
from mpitrain.objective.metrics import Metric
from mpitrain.ranks.together import together

#: ``forward(x)``: a virtual stage's outputs for samples, ``None`` standing for two of the data's.
Forward = Callable[[Array | None], Array]


class Purity:
    """The layers, the loss and the metrics of a job on this rank, as far as they are not ours."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        layers: Mapping[str, Layer],
        own: Sequence[str],
        loss: LossFunction,
        metrics: Mapping[str, Metric],
    ) -> None:
        """All the model's ``layers``, of which this rank has its ``own``."""
        self._comm = comm
        self._is_tried = any(layer.verdicts() for layer in layers.values())  # alike on all ranks
        self._verdicts = [found for name in own for found in layers[name].verdicts()]
        self._functions = [loss, *metrics.values()]

    def examine(self, stages: Iterable[tuple[int, Forward | None]]) -> None:
        """Take two samples through the layers, if some of them must be tried; collective.

        Args:
            stages: rank of each virtual stage, and its forward pass on that rank.

        Raises:
            ConfigError: on all ranks, what a layer of one of them has shown.
        """
        if not self._is_tried:
            return
        x: Array | None = None
        for rank, forward in stages:

            def act(forward: Forward | None = forward, x: Array | None = x) -> Array | None:
                return forward(x) if forward else None

            y = together(self._comm, act, ConfigError, DataError, RuntimeError, TypeError)
            x = self._comm.bcast(y, rank)
        for verdict in self._verdicts:
            verdict.deferred = True

    def faults(self) -> list[ValueError]:
        """The first fault of each layer and function of this rank."""
        found = [verdict.fault for verdict in self._verdicts]
        found += [getattr(own, "fault", None) for own in self._functions]
        return [fault for fault in found if fault]

    def expect(self, when: str = "") -> None:
        """No rank has seen a fault; collective.

        Args:
            when: begins the message, as ``"step 7"``.

        Raises:
            ConfigError: on all ranks, what a layer of one of them, or a loss or a metric of the
                program's own, has shown in a forward pass.
        """

        def act() -> None:
            for fault in self.faults():
                raise type(fault)(f"{when}: {fault}") if when else fault

        together(self._comm, act, ConfigError)
