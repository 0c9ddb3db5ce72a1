"""Embedding tables spread over ranks, and linear layers on their vectors (Naumov et al. 2019)."""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.arrays import Array, Parameters, Shape, array_namespace
from mpitrain.group import TensorGroup, share
from mpitrain.kernels import kernels_of
from mpitrain.models import perceptron
from mpitrain.nn.layer import Initial


def layers(
    tables: int, rows: int, width: int, hidden: tuple[int, ...], classes: int, group: TensorGroup
) -> dict[str, nn.Layer]:
    """Tables of ``rows`` vectors of ``width`` numbers, then a perceptron."""
    own = nn.Chain({"rows": SpreadTables(tables, rows, width, group)})
    read = (tables * width,)
    whole = TensorGroup()  # tables are spread over the replicas, and no layer is shared
    return {"tables": own, **perceptron.layers(read, hidden, classes, whole, "linear")}


class SpreadTables(nn.Layer):
    """One row of each table: integers x_NK to y_NKD; each rank of a group has whole tables.

    Each rank has samples of its own.  Two all-to-alls forward, with indices and with vectors, and
    one backward; a table's gradient is complete where the table lies.
    """

    spread = frozenset({"table"})

    def __init__(self, tables: int, rows: int, width: int, group: TensorGroup) -> None:
        self.tables = tables
        self.rows = self.choices = rows
        self.width = width
        self.group = group

    def initial(self) -> Mapping[str, Initial]:
        return {"table": Initial((self.tables, self.rows, self.width), 0.1)}

    def output_shape(self, shape: Shape) -> Shape:
        return self.tables, self.width

    def forward(self, parameters: Parameters, x: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        table = parameters["table"]
        xp = array_namespace(table)
        samples = self._samples(len(x))
        asked = self._to_tables(x.T, samples)  # (own tables, all samples)
        found = table[xp.arange(len(table))[:, None], asked]
        y = self._to_samples(found, samples)
        return xp.moveaxis(y, 0, 1), (asked, samples, xp.arange(len(table)))

    def backward(self, parameters: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        asked, samples, which = saved
        xp = array_namespace(dy)
        arrived = self._to_tables(xp.moveaxis(dy, 1, 0), samples)
        return xp.zeros(dy.shape[:2], dy.dtype), (asked, which, arrived)

    def gradients(self, parameters: Parameters, kept: Any) -> dict[str, Array]:
        asked, which, arrived = kept
        table = parameters["table"]
        # The tables lie one after another, as one table.
        rows = asked + (which * table.shape[1])[:, None]
        values = arrived.reshape(-1, self.width)
        found = kernels_of(arrived).scatter_add(rows.reshape(-1), values, prod(table.shape[:2]))
        return {"table": found.reshape(table.shape)}

    def _samples(self, own: int) -> Array:
        comm = self.group.comm
        return np.array(comm.allgather(own) if comm else [own])

    def _owners(self) -> list[int]:
        parts = [share(self.tables, rank, self.group.size) for rank in range(self.group.size)]
        return [part.stop - part.start for part in parts]

    def _to_tables(self, x: Array, samples: Array) -> Array:
        """From (all tables, own samples, ...) to (own tables, all samples, ...)."""
        own = self._owners()[self.group.rank]
        shapes = [(own, int(n), *x.shape[2:]) for n in samples]
        xp, ends = array_namespace(x), np.cumsum(self._owners())[:-1].tolist()
        return xp.concatenate(self.group.exchange(xp.split(x, ends), shapes), axis=1)

    def _to_samples(self, x: Array, samples: Array) -> Array:
        """From (own tables, all samples, ...) to (all tables, own samples, ...)."""
        mine = int(samples[self.group.rank])
        shapes = [(n, mine, *x.shape[2:]) for n in self._owners()]
        xp, ends = array_namespace(x), np.cumsum(samples)[:-1].tolist()
        return xp.concatenate(self.group.exchange(xp.split(x, ends, axis=1), shapes))
