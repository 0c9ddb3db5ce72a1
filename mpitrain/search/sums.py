"""Sums over the layers of a stage."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mpitrain.search.layers import LayerCost

#: Layers ``first <= layer < stop``.
Span = tuple[int, int]


@dataclass(frozen=True)
class LayerSums:
    """Sums over layers with one sample: numbers, or arrays ``[i, j]`` over the layers i to j - 1.

    Attributes:
        forward, forward_unshared, backward, backward_unshared, kept, kept_shared, scores, placed,
            rows, keys, fixed: sums of what :class:`~mpitrain.search.layers.LayerCost` has of each
            layer.
        parameters: parameters without the placed ones.
        tied: parameters of the first layer that a stage without it holds, too.
        summed, sums: numbers that tensor ranks sum, and number of the sums.
        exchanges, rings: layers that exchange rows, and keys.
        layers: number of layers.
        inputs: numbers of the layers' inputs.
        received, outputs: numbers that come from the stage before, and go to the stage behind.
    """

    forward: Any
    forward_unshared: Any
    backward: Any
    backward_unshared: Any
    kept: Any
    kept_shared: Any
    scores: Any
    placed: Any
    rows: Any
    keys: Any
    fixed: Any
    parameters: Any
    tied: Any
    summed: Any
    sums: Any
    exchanges: Any
    rings: Any
    layers: Any
    inputs: Any
    received: Any
    outputs: Any

    @classmethod
    def over(cls, layers: Sequence[LayerCost]) -> "LayerSums":
        """The sums over each stage that these layers can make."""

        def sums(values: Sequence[float]) -> Any:
            ends = np.concatenate([[0.0], np.cumsum(values)])
            return ends[None, :] - ends[:, None]

        names = "forward forward_unshared backward backward_unshared kept kept_shared scores placed"
        each = (*names.split(), "rows", "keys", "fixed")
        found = {name: sums([getattr(own, name) for own in layers]) for name in each}
        tied = sums([own.tied for own in layers])
        tied[0] = 0.0
        between = np.array([0.0, *(own.outputs for own in layers[:-1]), 0.0])
        ends = np.ones((len(layers) + 1, 1))
        return cls(
            **found,
            parameters=sums([own.parameters - own.placed for own in layers]),
            tied=tied,
            summed=sums([sum(own.summed) for own in layers]),
            sums=sums([len(own.summed) for own in layers]),
            exchanges=sums([own.rows > 0 for own in layers]),
            rings=sums([own.keys > 0 for own in layers]),
            layers=sums([1.0] * len(layers)),
            inputs=sums([layers[0].kept + layers[0].kept_shared, *between[1:-1]]),
            received=between[:, None] * ends.T,
            outputs=ends * between,
        )

    def at(self, span: Span) -> "LayerSums":
        """The sums over some layers in a row."""
        return LayerSums(**{name: float(value[span]) for name, value in vars(self).items()})

    @property
    def whole(self) -> "LayerSums":
        """The sums over all layers."""
        return self.at((0, len(self.layers) - 1))

    def each(self) -> "LayerSums":
        """The layers by themselves: arrays ``[i]``."""
        return LayerSums(**{name: value.diagonal(1) for name, value in vars(self).items()})

    def of(self, spans: Sequence[Span]) -> "LayerSums":
        """The sums over the chunks of a stage; neighbours, as at the tip of a V, are one chunk."""
        joined: list[Span] = []
        for first, stop in spans:
            if joined and joined[-1][1] == first:
                first = joined.pop()[0]
            joined.append((first, stop))
        chunks = [self.at(span) for span in joined]
        found = {one.name: sum(getattr(own, one.name) for own in chunks) for one in fields(self)}
        if joined[0][0] == 0:  # one copy of what is tied to the first layer
            found["tied"] = 0.0
        return LayerSums(**found)
