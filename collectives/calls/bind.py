"""From a call to the plan that carries it out: which algorithm, on which transport."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from typing import cast

from collectives.algorithms import build, in_segments
from collectives.analysis.formulas import segments_for
from collectives.calls.call import Call
from collectives.calls.library import library
from collectives.calls.native import NativePlan, can_be_native, fault_of_native, waits_for_device
from collectives.calls.nccl import bind_nccl, fault_of_nccl
from collectives.calls.reduction import combiner
from collectives.calls.reproducible import bind_exact, is_rounded, saturates
from collectives.calls.resources import Resources
from collectives.calls.settings import Settings
from collectives.calls.staging import Operands
from collectives.calls.tuner import Choice, Kind, Situation, choose
from collectives.errors import CollectiveError
from collectives.execution.memory import Memory, is_queued
from collectives.execution.messages import bind
from collectives.execution.plan import Plan
from collectives.execution.progress import Underway
from collectives.execution.shared import Places, bind_shared, runs_shared
from collectives.execution.tags import Lane, Mask
from collectives.execution.transport.cuda_memory import CudaMemory

log = logging.getLogger("collectives")


def bind_call(
    call: Call,
    resources: Resources,
    places: Places | None,
    underway: Underway,
    used_anywhere: Callable[[Mask], Mask] | None,
    keep: Callable[[Plan], object] | None = None,
) -> Plan | NativePlan:
    """Binds ``call``; the same on all ranks.

    Args:
        places: where all ranks' buffers lie, if that is in the node's memory.
        underway: the communicator's plans that are under way.
        used_anywhere: for a plan of the caller's, how the ranks agree on tags and counters that no
            other plan has (:class:`~collectives.execution.tags.Lanes`).  ``None`` for a blocking
            call: it has those of all blocking calls, and names the memory by address, so that the
            plan does not keep it.
        keep: of a nonblocking call in host memory that the ranks share: takes the plan at the end
            of its run, and keeps the caller's memory until then.

    Raises:
        InvalidBuffer: for buffers that share memory, or whose sum cannot be reproducible.
        CollectiveError: on all ranks, if there are more plans than tags.
    """
    memory = resources.devices.memory(call.buffer.gpu)
    with memory.working() if is_queued(memory) else nullcontext():
        return _bound(call, resources, memory, places, underway, used_anywhere, keep)


def _bound(
    call: Call,
    resources: Resources,
    memory: Memory,
    places: Places | None,
    underway: Underway,
    used_anywhere: Callable[[Mask], Mask] | None,
    keep: Callable[[Plan], object] | None,
) -> Plan | NativePlan:
    """As :func:`bind_call`; what is allocated in it is the plans' stream's."""
    size = call.member.size
    if resources.settings.reproducible and is_rounded(call):
        underway.expect_whole()
        lane = _tags(resources, used_anywhere)
        return bind_exact(call, resources.transport, lane, underway)
    planned = used_anywhere is not None
    algorithm, reason = _choice(call, resources, memory_of(call, resources, places), planned)
    log.info("%s: %s (%s)", call, algorithm, reason)
    if algorithm == "native":
        before = waits_for_device(call.arguments, resources.devices.is_direct)
        return NativePlan(resources.comm, call.arguments, reason, underway, before)
    underway.expect_whole()
    if algorithm == "nccl":
        if resources.settings.needs_messages:
            raise CollectiveError(
                f"{call.collective}: NCCL's messages carry no checksums and arrive when they like; "
                "leave the algorithm out, or use a communicator without these"
            )
        nccl = resources.devices.nccl(cast(CudaMemory, memory).gpu)
        return bind_nccl(call, nccl, reason, underway, borrow=not planned)
    items = None if call.counts else call.count * call.contract.blocks(size)
    schedule = build(call.collective, algorithm, size, call.root, items, call.proved)
    buffer = call.buffer
    combine = None
    if call.op is not None:
        combine = combiner(call.op, buffer.items.dtype, buffer.datatype)
    node, lane = resources.node, None
    if node and places and runs_shared(schedule, places) and not call.widens:
        if used_anywhere is not None:
            lane = node.slots.take(used_anywhere)
        if lane is not None or used_anywhere is None:
            return bind_shared(
                schedule,
                node,
                places,
                call.count,
                buffer.items.dtype,
                memory,
                combine,
                lane=lane,
                reason=reason,
                underway=underway,
                met=not planned,
                keep=keep,
            )
        log.warning("messages instead of shared memory: %d plans use it", node.slots.most)
    lane = _tags(resources, used_anywhere)
    operands = Operands(call, borrow=lane is None, widens=call.widens, memory=memory)
    return bind(
        schedule,
        resources.devices.transport_of(buffer.gpu),
        operands.send,
        operands.recv,
        combine,
        counts=call.counts,
        memory=memory,
        aside=call.aside,
        before=operands.before,
        after=operands.after,
        lane=lane,
        reason=reason,
        underway=underway,
    )


def _tags(resources: Resources, used_anywhere: Callable[[Mask], Mask] | None) -> Lane | None:
    """Of a plan of the caller's; ``None`` for those of all blocking calls."""
    return None if used_anywhere is None else tags_of(resources, used_anywhere)


def tags_of(resources: Resources, used_anywhere: Callable[[Mask], Mask]) -> Lane:
    """Of a plan of the caller's; collective.

    Raises:
        CollectiveError: on all ranks, if there are more plans than tags.
    """
    lane = resources.tags.take(used_anywhere)
    if lane is None:
        raise CollectiveError(
            f"there are {resources.tags.most} plans on this communicator, and this MPI has no "
            "tags for more; Free some"
        )
    return lane


def best_of_ours(call: Call, resources: Resources, memory: Kind) -> Choice:
    """What ``auto`` would take if there were no native; the same on all ranks."""
    per_node, table = resources.facts
    situation = _situation(call, per_node, memory, resources.settings)
    choice = choose(table, situation._replace(native=False))
    return _in_segments(call, resources, choice)


def memory_of(call: Call, resources: Resources, places: Places | None) -> Kind:
    """What ``auto`` may count on; the same on all ranks."""
    if call.is_on_device:
        return "ipc" if places else "cupy"
    if places is None:
        return "numpy"
    node = resources.node
    assert node is not None, "the places are in its memory"
    return "adopted" if node.has_edges(chain.from_iterable(places)) else "shared"


def _choice(call: Call, resources: Resources, memory: Kind, planned: bool) -> Choice:
    """The algorithm with all its options, and why."""
    choice = Choice(call.algorithm, call.why)
    delays = resources.settings.transport.delays
    if call.algorithm == "auto" or (call.algorithm == "native" and delays):
        fault = fault_of_native(call, planned)
        per_node, table = resources.facts
        situation = _situation(call, per_node, memory, resources.settings)
        if resources.settings.reproducible and saturates(call):
            situation = situation._replace(native=False)
        situation = situation._replace(native=situation.native and not fault)
        choice = choose(table, situation)
        gpu = call.buffer.gpu
        if choice.algorithm == "nccl" and gpu is not None and not resources.devices.has_nccl(gpu):
            choice = choose(table, situation._replace(nccl=False))
        if fault and not delays:
            choice = choice._replace(reason=fault)
    return _in_segments(call, resources, choice)


def _in_segments(call: Call, resources: Resources, choice: Choice) -> Choice:
    """With the number of segments that the cost model finds best, where it is asked."""
    if "segments=auto" not in choice.algorithm:
        return choice
    alpha, beta = 1e-6 * resources.table.alpha_us, 1e-9 / resources.table.bandwidth_GBs
    algorithm = in_segments(
        call.collective,
        choice.algorithm,
        call.member.size,
        lambda schedule: segments_for(schedule, call.known_nbytes, alpha, beta),
    )
    return choice._replace(algorithm=algorithm)


def _situation(call: Call, per_node: int, memory: Kind, settings: Settings) -> Situation:
    """What the tuning table is asked.

    Args:
        per_node: ranks of a node.
        memory: of the buffers.
        settings: what messages must carry.
    """
    return Situation(
        library(),
        call.collective,
        call.known_nbytes,
        call.member.size,
        per_node,
        commutes=call.op is None or call.op.is_commutative,
        native=can_be_native(call) and not settings.needs_messages,
        has_checksums=settings.has_checksums,
        delays=settings.transport.delays,
        uneven=call.counts is not None,
        memory=memory,
        nccl=not (settings.needs_messages or fault_of_nccl(call)),
    )
