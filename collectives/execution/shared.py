"""A schedule on memory that all its ranks can address: where their buffers lie, how they are cut,
and a plan of one rank's rounds there (``shared_rounds.py``)."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.algorithms.segments import MOST_SEGMENTS, passes_on
from collectives.compile.dataflow import Dataflow, Endpoint
from collectives.execution.memory import Combine, Memory, is_queued
from collectives.execution.messages import Layout, Operands, prepared
from collectives.execution.plan import Action, Binding, Plan, plan_class
from collectives.execution.shared_rounds import SharedBinder
from collectives.execution.transport.flags import BLOCKING, all_reached
from collectives.execution.transport.windows import Place, Places
from collectives.schedule import Copy, Schedule

if TYPE_CHECKING:
    from collectives.execution.transport.shared_memory import NodeMemory

#: Chunks are cut into segments of about this size: what is reduced, or sent, is stored to the
#: others while it is in a level-2 cache of 1 MiB, together with where it came from.
SEGMENT_BYTES = 1 << 19
#: And where nothing is used again: C libraries store long copies past the cache, if at all.
COPIED_BYTES = 1 << 22


def runs_shared(schedule: Schedule, places: Places) -> bool:
    """Whether ``schedule`` needs no other memory than the buffers, and ranks may wait for whole
    rounds of one another."""
    return (
        not schedule.workspace
        and (schedule.in_place or not _is_in_place(schedule, places))
        and schedule.aligned
    )


def _is_in_place(schedule: Schedule, places: Places) -> bool:
    return any(
        send is None and schedule.contract.send_blocks(schedule.member(rank))
        for rank, (send, _) in enumerate(places)
    )


def bind_shared(
    schedule: Schedule,
    node: "NodeMemory",
    places: Places,
    count: int,
    dtype: "np.dtype[Any]",
    combine: Combine | None,
    binding: Binding,
) -> Plan:
    """A plan for ``schedule`` on arrays that lie in the node's memory.

    Args:
        places: where all ranks' buffers lie, which :func:`runs_shared` must allow.
        count: items of a block.
    """
    memory, tags, borrow = binding.memory, binding.tags, binding.borrows
    slot = BLOCKING if tags is None else BLOCKING + 1 + tags.number
    blocks = schedule.contract.blocks(schedule.size)
    segments = _segments(schedule, count, dtype, memory)
    flow = Dataflow(schedule, _is_in_place(schedule, places), segments)
    layout = Layout.even(count, blocks, flow.schedule.chunks)
    buffers = []
    for rank in range(schedule.size):
        operands = _operands(schedule, rank, node, places[rank], count, dtype)
        named = prepared(schedule, rank, operands, memory).buffers
        buffers.append({k: memory.borrowed(v) if borrow else v for k, v in named.items()})
    combine = combine and memory.combine(combine)
    met = binding.met and not is_queued(memory)
    bound = SharedBinder(flow, node, slot, memory, buffers, layout, combine, met)
    before: list[Action] = []
    if (traffic := binding.progress.traffic) is not None:
        before.append(partial(traffic.share, _moved_bytes(flow, node.rank, layout, dtype)))
    return plan_class(binding)(
        schedule.collective,
        flow.schedule.algorithm,
        count * blocks * dtype.itemsize,
        bound.rounds(before),
        all_reached,
        binding,
    )


def _segments(schedule: Schedule, count: int, dtype: "np.dtype[Any]", memory: Memory) -> int:
    """The segments that blocks of ``count`` items are cut into, which run one after the other."""
    largest = -(-count // schedule.chunks) * dtype.itemsize
    if is_queued(memory) or largest <= SEGMENT_BYTES:  # a GPU is better off with few kernels
        return 1
    most = SEGMENT_BYTES if passes_on(schedule) else COPIED_BYTES
    return min(-(-largest // most), MOST_SEGMENTS)


def _operands(
    schedule: Schedule,
    rank: int,
    node: "NodeMemory",
    places: tuple[Place | None, Place | None],
    count: int,
    dtype: "np.dtype[Any]",
) -> Operands:
    """The buffers of ``rank``, as this process addresses them."""
    member, contract = schedule.member(rank), schedule.contract
    blocks = contract.send_blocks(member), contract.recv_blocks(member)
    send, recv = (
        None if place is None else node.view(rank, place, count * number, dtype)
        for place, number in zip(places, blocks)
    )
    return Operands(send, recv)


def _moved_bytes(flow: Dataflow, rank: int, layout: Layout, dtype: "np.dtype[Any]") -> int:
    """Bytes that a rank stores into others' memory, and loads from it, in one run."""
    items = 0
    for number, steps in enumerate(flow.programs[rank]):
        for position, step in enumerate(steps):
            end = Endpoint(rank, number, position)
            if not isinstance(step, Copy) and flow.mover(end) == rank:
                for segment in range(flow.segments):
                    part = layout.items(flow.at(step.chunk, segment))
                    items += part.stop - part.start
    return items * dtype.itemsize
