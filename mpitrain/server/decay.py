"""Weight decay where a step is the sum of several pushes."""

from dataclasses import replace

from mpitrain.optim.groups import Grouping, ParameterGroup
from mpitrain.optim.optimizers import Adam


def in_parts(usual: Grouping, part: float) -> Grouping:
    """As ``usual``, with ``part`` of the weight decay in each push, so that a step has all of it.

    AdamW's stays: each push is a step of the whole rate there, and its decay a part of that step.
    """
    known: dict[int, ParameterGroup] = {}

    def grouped(name: str) -> ParameterGroup:
        found = usual(name)
        optimizer = found.optimizer
        if isinstance(optimizer, Adam) and optimizer.decoupled:
            return found
        if id(found) not in known:
            decay = optimizer.weight_decay * part  # type: ignore[attr-defined]
            scaled = replace(optimizer, weight_decay=decay)  # type: ignore[type-var]
            known[id(found)] = replace(found, optimizer=scaled)
        return known[id(found)]  # the same one for equal tensors, which are updated together

    return grouped
