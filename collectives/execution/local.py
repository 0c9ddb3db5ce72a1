"""Runs a schedule on real data with all ranks in this process: for tests, teaching and notebooks.

>>> from collectives.algorithms import build
>>> run(build("allreduce", "ring", 3), [np.array([1, 2]), np.array([3, 4]), np.array([5, 6])])
[array([ 9, 12]), array([ 9, 12]), array([ 9, 12])]
"""

from collections.abc import Sequence

import numpy as np

from collectives.errors import ScheduleError
from collectives.execution.memory import Combine, Items
from collectives.execution.messages import Counts, Operands, bind
from collectives.execution.plan import Plan
from collectives.execution.transport.local import connect
from collectives.schedule import Schedule


def run(
    schedule: Schedule,
    inputs: Sequence[Items],
    combine: Combine = np.add,
    *,
    in_place: bool = False,
    counts: Sequence[Counts] | None = None,
) -> list[Items | None]:
    """Every rank's receive buffer, ``None`` for a rank that has none.

    Args:
        inputs: one 1-D array for each rank, of equal dtype; empty where a rank has nothing to send.
        in_place: put each input where ``MPI.IN_PLACE`` expects it and pass no send buffer.
        counts: one for each rank, of a v-variant.

    Raises:
        ScheduleError: if the ranks wait for one another for ever.
    """
    blocks, root = schedule.contract, schedule.member(schedule.root)
    count = inputs[schedule.root].size // blocks.send_blocks(root)
    plans: list[Plan] = []
    outputs: list[Items | None] = []
    for transport, items in zip(connect(schedule.size), inputs, strict=True):
        rank = transport.rank
        member = schedule.member(rank)._replace(chunks=1)
        length = sum(counts[rank].recv) if counts else count * blocks.recv_blocks(member)
        output = np.zeros(length, items.dtype) if blocks.recv_blocks(member) else None
        send: Items | None = items if blocks.send_blocks(member) else None
        first = blocks.place(member) if in_place else None
        if first is not None and output is not None:
            start = sum(counts[rank].recv[:first]) if counts else first * count
            output[start : start + items.size] = items
            send = None
        shape = counts[rank] if counts else None
        plans.append(bind(schedule, transport, Operands(send, output, shape), combine))
        outputs.append(output)
    for plan in plans:
        plan.Start()
    waiting = list(plans)
    while waiting:
        reached = [plan.completed for plan in waiting]
        waiting = [plan for plan in waiting if not plan.Test()]
        if waiting and [plan.completed for plan in waiting] == reached:
            raise ScheduleError(f"{schedule}: the ranks wait for one another for ever")
    return outputs
