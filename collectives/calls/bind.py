"""From a call to the plan that carries it out: chooses the algorithm, then binds its schedule."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from collectives import extras
from collectives.algorithms import build, in_segments, own, parse
from collectives.calls.buffers import OPAQUE, CallBuffer
from collectives.calls.call import Call
from collectives.calls.choice import Choice, Kind, Situation, choose
from collectives.calls.native import can_be_native, fault_of_native, library, waits_for_device
from collectives.calls.native_plan import NativePlan
from collectives.calls.resources import Resources
from collectives.errors import CollectiveError
from collectives.execution.memory import HOST, Items, Memory, is_queued
from collectives.execution.messages import Operands, bind
from collectives.execution.plan import Action, Binding, Plan
from collectives.execution.transport.windows import Places
from collectives.schedule import Schedule

log = logging.getLogger("collectives")

#: Smaller calls go as messages: they take no longer, and need no memory.
SLOTS_FROM_BYTES = 8 << 10


class Binder:
    """Binds the calls of one communicator; its methods do the same on all ranks."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    def bind(
        self,
        call: Call,
        places: Places | None,
        planned: bool,
        keep: Callable[[Plan], object] | None = None,
        in_order: bool = True,
    ) -> Plan | NativePlan:
        """The plan of a call.

        Args:
            places: where all ranks' buffers lie, if that is in the node's memory.
            planned: gives it tags and counters of its own.  A blocking call uses those of all
                blocking calls, and names the memory by address, so that its plan does not keep it.
            keep: takes the plan of a nonblocking call in shared memory at the end of its run.
            in_order: whether the ranks begin the runs of such plans in one order.

        Raises:
            InvalidBuffer: buffers share memory, or their sum cannot be reproducible.
            CollectiveError: on all ranks, if there are more plans than tags.
        """
        memory = self._resources.devices.memory(call.buffer.gpu)
        with memory.working() if is_queued(memory) else nullcontext():
            return self._bind(call, memory, places, planned, keep, in_order)

    def _bind(
        self,
        call: Call,
        memory: Memory,
        places: Places | None,
        planned: bool,
        keep: Callable[[Plan], object] | None,
        in_order: bool,
    ) -> Plan | NativePlan:
        """As :meth:`bind`; what is allocated in it is the plans' stream's."""
        resources, progress = self._resources, self._resources.progress
        if resources.settings.reproducible and extras.is_rounded(call):
            progress.expect_whole()
            binding = Binding("reproducible", progress, resources.take_tags() if planned else None)
            operands = staged(call, not planned, widens=False)
            return extras.bind_exact(call, resources.transport, operands, binding)
        algorithm, reason = self._choice(call, self.memory_of(call, places), planned, in_order)
        log.info("%s: %s (%s)", call, algorithm, reason)
        if algorithm == "native":
            before = waits_for_device(call.arguments, resources.devices.is_direct)
            least = call.least_bytes
            return NativePlan(resources.given, call.arguments, reason, progress, before, least)
        progress.expect_whole()
        binding = Binding(reason, progress, None, memory, met=not planned, keep=keep)
        if algorithm == "nccl":
            if resources.settings.needs_messages:
                raise CollectiveError(
                    f"{call.collective}: NCCL's messages carry no checksums and arrive when they "
                    "like; leave the algorithm out, or use a communicator without these"
                )
            assert call.buffer.gpu is not None, "NCCL takes no other arrays"
            nccl = resources.devices.nccl(call.buffer.gpu)
            return extras.bind_nccl(call, nccl, binding, borrow=not planned)
        items = None if call.counts else call.count * call.contract.blocks(call.member.size)
        size, root = call.member.size, call.root
        schedule = build(call.collective, algorithm, size, root, items, call.proved)
        node, dtype = resources.node, call.buffer.items.dtype
        if node and places and extras.runs_shared(schedule, places) and not call.widens:
            tags = node.slots.take(resources.used_anywhere) if planned else None
            if tags is not None or not planned:
                binding = replace(binding, tags=tags)
                return extras.bind_shared(
                    schedule, node, places, call.count, dtype, call.combine, binding
                )
            log.warning("messages instead of shared memory: %d plans use it", node.slots.most)
        fits = in_order and self._fits_slots(call, schedule, memory)
        slots = resources.slots if fits else None
        # On several nodes, only what says how many ranks they have was written for them.
        if slots and (len(slots.ranks) == size or "local" in parse(algorithm)[1]):
            operands = staged(call, not planned, widens=False)
            wide = np.dtype(np.float32) if call.widens else None
            tags = resources.take_tags() if planned and len(slots.ranks) < size else None
            binding = replace(binding, tags=tags, keep=None)
            name = algorithm, *own(call.collective, algorithm)
            given = call.combine, binding, resources.extent(schedule, name), str(call), wide
            return extras.bind_slots(schedule, slots, operands, *given)
        binding = replace(binding, tags=resources.take_tags() if planned else None, keep=None)
        operands = staged(call, not planned, call.widens, memory)
        transport = resources.devices.transport_of(call.buffer.gpu)
        return bind(schedule, transport, operands, call.combine, binding)

    def _fits_slots(self, call: Call, schedule: Schedule, memory: Memory) -> bool:
        """Whether a call runs through slots where its ranks have them; the same on all ranks."""
        is_usual = call.counts is None and not is_queued(memory)
        is_large = call.known_nbytes >= SLOTS_FROM_BYTES
        return is_usual and is_large and extras.fits_slots(schedule, call.buffer.items.itemsize)

    def memory_of(self, call: Call, places: Places | None) -> Kind:
        """The kind of memory that the table is asked about."""
        if call.is_on_device:
            return "ipc" if places else "cupy"
        return "shared" if places else "numpy"

    def _choice(self, call: Call, memory: Kind, planned: bool, in_order: bool) -> Choice:
        """The algorithm with all its options, and the reason for it."""
        choice = Choice(call.algorithm, call.why)
        resources, delays = self._resources, self._resources.settings.transport.delays
        if call.algorithm == "auto" or (call.algorithm == "native" and delays):
            fault = fault_of_native(call, planned)
            native = can_be_native(call) and not resources.settings.needs_messages and not fault
            situation = self._situation(call, memory, native)._replace(unordered=not in_order)
            choice = choose(resources.table, situation)
            if native and call.buffer.items.dtype == OPAQUE:
                choice = Choice("native", "only the library knows its items")
            if native and call.op is not None and not call.op.is_predefined:
                choice = Choice("native", "the program's operation may take numbers in groups")
            gpu = call.buffer.gpu
            nccl = choice.algorithm == "nccl"
            if nccl and gpu is not None and not resources.devices.has_nccl(gpu):
                choice = choose(resources.table, situation._replace(nccl=False))
            if fault and not delays:
                choice = choice._replace(reason=fault)
        return self._in_segments(call, choice)

    def _in_segments(self, call: Call, choice: Choice) -> Choice:
        """Replaces ``segments=auto`` by the number that the cost model finds best."""
        if "segments=auto" not in choice.algorithm:
            return choice
        table = self._resources.table
        model = extras.CostModel(1e-6 * table.alpha_us, 1e-9 / table.bandwidth_GBs, 0.0)
        algorithm = in_segments(
            call.collective,
            choice.algorithm,
            call.member.size,
            lambda schedule: extras.best_segments(
                schedule,
                call.known_nbytes / (schedule.chunks * call.contract.blocks(schedule.size)),
                model,
            ),
        )
        return choice._replace(algorithm=algorithm)

    def _situation(self, call: Call, memory: Kind, native: bool) -> Situation:
        """The question to the tuning table."""
        settings = self._resources.settings
        per_node, _ = self._resources.facts
        return Situation(
            library(),
            call.collective,
            call.known_nbytes,
            call.member.size,
            per_node,
            commutes=call.op is None or call.op.is_commutative,
            native=native,
            has_checksums=settings.has_checksums,
            delays=settings.transport.delays,
            uneven=call.counts is not None,
            memory=memory,
            even=self._resources.is_even,
            nccl=call.is_on_device and not (settings.needs_messages or extras.fault_of_nccl(call)),
        )


def staged(call: Call, borrow: bool, widens: bool, memory: Memory = HOST) -> Operands:
    """The operands of a call: the caller's buffers, or copies where a plan cannot work on these.

    Blocks of a v-variant, and items of derived types, may lie anywhere in the caller's buffer: both
    are packed.  Numbers of 16 and 8 bits are reduced in 32 bits by every algorithm, so that
    the result is rounded once and not with every rank.

    Args:
        borrow: names the caller's memory by address, so that the plan does not keep it.
        widens: converts numbers of 16 and 8 bits to float32.
        memory: where the buffers lie.
    """
    staging = _Staging(borrow, memory)
    in_place = call.send is None
    receives = call.collective != "exscan" or call.member.rank > 0
    send = staging.packed(call.send, reads=True, writes=False)
    recv = staging.packed(call.recv, reads=in_place, writes=receives)
    if call.overlap and send is not None:  # sent as it is before the run
        send = staging.copied(send, send.dtype, reads=True, writes=False)
    if widens:
        wide = np.dtype(np.float32)
        if send is not None:
            send = staging.copied(send, wide, reads=True, writes=False)
        if recv is not None:
            recv = staging.copied(recv, wide, reads=in_place, writes=receives)
    return Operands(send, recv, call.counts, call.aside, staging.before, staging.after)


class _Staging:
    """Collects the copies to be made before and after each run."""

    def __init__(self, borrow: bool, memory: Memory) -> None:
        self._borrow = borrow
        self._memory = memory
        self.before: list[Action] = []
        self.after: list[Action] = []

    def packed(self, buffer: CallBuffer | None, reads: bool, writes: bool) -> Items | None:
        """The items of a buffer, one behind the other."""
        if buffer is None:
            return None
        writes = writes and buffer.writable
        if buffer.gaps is not None:
            if reads:
                self.before.append(partial(buffer.gaps.pack, buffer.items))
            if writes:
                self.after.insert(0, partial(buffer.gaps.unpack, buffer.items))
            return buffer.items
        if buffer.displacements is None:
            return buffer.view(self._borrow)
        blocks = buffer.blocks(self._borrow)
        packed = self._memory.empty(sum(b.size for b in blocks), buffer.items.dtype)
        ends = np.cumsum([b.size for b in blocks])
        for block, end in zip(blocks, ends.tolist()):
            self._stage(block, packed[end - block.size : end], reads, writes)
        return packed

    def copied(self, items: Items, dtype: "np.dtype", reads: bool, writes: bool) -> Items:
        """A copy of ``items`` in another type."""
        copy = self._memory.empty(items.size, dtype)
        self._stage(items, copy, reads, writes)
        return copy

    def _stage(self, outside: Items, inside: Items, reads: bool, writes: bool) -> None:
        if reads:
            self.before.append(partial(self._memory.convert, inside, outside))
        if writes:
            self.after.insert(0, partial(self._memory.convert, outside, inside))
