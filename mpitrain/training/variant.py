"""How kinds of jobs differ: with servers, of clients, or synchronous."""

from collections.abc import Callable
from dataclasses import dataclass

from collectives import Communicator
from mpitrain.arrays import Array
from mpitrain.group import TensorGroup
from mpitrain.optim.groups import Grouping
from mpitrain.optim.lr import Rates
from mpitrain.parallel.grid import ProcessGrid
from mpitrain.parallel.store import Store
from mpitrain.step.update import Updater
from mpitrain.sync.strategy import Strategy
from mpitrain.training import build
from mpitrain.training.parts import Parts


@dataclass(frozen=True)
class Variant:
    """Functions that make the parts in which kinds of jobs differ; by default synchronous training.

    Attributes:
        spread: gives the ranks over which embedding tables and experts are spread.
        hold: makes the store of the flat initial parameters, as :func:`build.in_replicas` does.
        group: changes how each parameter is updated.
        update: makes the updater; ``None``: as [optim] says.
        synchronise: makes the strategy; ``None``: as [sync] says.
        rates: changes the learning rates.
    """

    spread: Callable[[ProcessGrid], TensorGroup] = lambda grid: grid.spread
    hold: Callable[[Parts, Array], tuple[Store, Communicator | None]] = build.in_replicas
    group: Callable[[Parts, Grouping], Grouping] = lambda parts, grouping: grouping
    update: Callable[[Parts], Updater] | None = None
    synchronise: Callable[[Store], Strategy] | None = None
    rates: Callable[[Rates], Rates] = lambda rates: rates


#: Variant of synchronous training.
USUAL = Variant()
