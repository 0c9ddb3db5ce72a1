"""From a call to the plan that carries it out: which algorithm, on which transport."""

import logging

from mpi4py import MPI

from collectives.algorithms import build, in_segments
from collectives.call import Call
from collectives.executor import TAGS_PER_PLAN, bind
from collectives.formulas import segments_for
from collectives.native import NativePlan
from collectives.operands import Operands, is_widened
from collectives.plan import Plan
from collectives.reduction import combiner
from collectives.resources import Resources
from collectives.shared_executor import Places, bind_shared, runs_shared
from collectives.transport.shared_memory import SLOTS
from collectives.tuner import Choice

log = logging.getLogger("collectives")


def bind_call(
    call: Call,
    resources: Resources,
    places: Places | None,
    number: int,
    borrow: bool,
    active: list[Plan],
) -> Plan | NativePlan:
    """Binds ``call``; the same on all ranks.

    Args:
        places: where all ranks' buffers lie, if that is in the node's memory.
        number: plans in flight together need different ones, for their tags and counters.
        borrow: name the caller's memory by address, so that the plan does not keep it.
        active: plans of the communicator that are under way.
    """
    size = call.member.size
    algorithm, reason = _choice(call, resources, shared=places is not None)
    log.info("%s: %s (%s)", call, algorithm, reason)
    if algorithm == "native":
        return NativePlan(resources.comm, call.arguments, reason)
    schedule = build(call.collective, algorithm, size, call.root)
    buffer = call.buffer
    combine = None
    if call.op is not None:
        combine = combiner(call.op, buffer.items.dtype, buffer.mpi_datatype())
    node = resources.node
    if node and places and runs_shared(schedule, places) and not is_widened(call):
        return bind_shared(
            schedule,
            node,
            1 if number == 0 else 2 + number % (SLOTS - 2),
            places,
            call,
            combine,
            borrow=borrow,
            reason=reason,
            active=active,
        )
    slots = (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) // TAGS_PER_PLAN
    operands = Operands(call, borrow)
    return bind(
        schedule,
        resources.device_transport if call.is_on_device else resources.transport,
        operands.send,
        operands.recv,
        combine,
        counts=call.counts,
        memory=buffer.memory,
        aside=call.aside,
        before=operands.before,
        after=operands.after,
        tag=(0 if number == 0 else 1 + number % (slots - 1)) * TAGS_PER_PLAN,
        reason=reason,
        active=active,
    )


def _choice(call: Call, resources: Resources, shared: bool) -> Choice:
    """The algorithm with all its options, and why."""
    choice = Choice(call.algorithm, "asked for")
    if call.algorithm == "auto":
        choice = call.choose(
            resources.table, resources.ranks_per_node, shared, resources.kind.sealed
        )
    if "segments=auto" not in choice.algorithm:
        return choice
    alpha, beta = 1e-6 * resources.table.alpha_us, 1e-9 / resources.table.bandwidth_GBs
    algorithm = in_segments(
        call.collective,
        choice.algorithm,
        call.member.size,
        lambda schedule: segments_for(schedule, call.nbytes, alpha, beta),
    )
    return choice._replace(algorithm=algorithm)
