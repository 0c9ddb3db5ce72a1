"""Runs a schedule on real data with all ranks in this process: for tests, teaching and notebooks.

>>> from collectives.algorithms import build
>>> run(build("allreduce", "ring", 3), [np.array([1, 2]), np.array([3, 4]), np.array([5, 6])])
[array([ 9, 12]), array([ 9, 12]), array([ 9, 12])]
"""

from collections.abc import Sequence

import numpy as np

from collectives.contracts import contract, place
from collectives.errors import ScheduleError
from collectives.executor import Combine, Items, bind
from collectives.schedule import Schedule
from collectives.transport.local import connect


def run(
    schedule: Schedule,
    inputs: Sequence[Items],
    combine: Combine = np.add,
    *,
    in_place: bool = False,
) -> list[Items]:
    """Every rank's receive buffer.

    Args:
        inputs: one 1-D array for each rank, of equal size and dtype.
        in_place: put each input where ``MPI.IN_PLACE`` expects it and pass no send buffer.

    Raises:
        ScheduleError: if the ranks wait for one another for ever.
    """
    blocks, size = contract(schedule.collective), schedule.size
    count = inputs[0].size // blocks.send_blocks(size)
    plans, outputs = [], []
    for transport, items in zip(connect(size), inputs, strict=True):
        output = np.zeros(count * blocks.recv_blocks(size), items.dtype)
        if in_place:
            first = place(blocks, transport.rank, 1) * count
            output[first : first + items.size] = items
        send = None if in_place else items
        plans.append(bind(schedule, transport, send, output, combine))
        outputs.append(output)
    for plan in plans:
        plan.Start()
    waiting = list(plans)
    while waiting:
        before = [plan.progress for plan in waiting]
        waiting = [plan for plan in waiting if not plan.Test()]
        if waiting and [plan.progress for plan in waiting] == before:
            raise ScheduleError(f"{schedule}: the ranks wait for one another for ever")
    return outputs
