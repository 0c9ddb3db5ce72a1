"""The arrays that a plan works on, where these cannot be the caller's own memory.

A v-variant's blocks may lie anywhere in the caller's buffer, and MPI's types may have gaps: both
are packed.
Sums of floating-point numbers of 16 and 8 bits are done in 32 bits, whatever the algorithm and the
MPI library, so that the result is rounded once and not with every rank.
"""

from functools import partial

import numpy as np

from collectives.calls.buffers import Buffer
from collectives.calls.call import Call
from collectives.execution.memory import HOST, Items, Memory
from collectives.execution.plan import Action


class Operands:
    """The operands of one call.

    Attributes:
        send, recv: what to bind; ``None`` as in the call.
        before, after: copies from and to the caller's memory.
    """

    def __init__(self, call: Call, borrow: bool, widens: bool, memory: Memory = HOST) -> None:
        """``borrow`` names the caller's memory by address, so that the plan does not keep it;
        ``widens`` 16-bit and 8-bit numbers to 32 bits; ``memory`` is where the buffers lie."""
        self._memory = memory
        self.before: list[Action] = []
        self.after: list[Action] = []
        in_place = call.send is None
        receives = call.collective != "exscan" or call.member.rank > 0
        self.send = self._packed(call.send, borrow, reads=True, writes=False)
        self.recv = self._packed(call.recv, borrow, reads=in_place, writes=receives)
        if call.overlap:
            self.send = self._aside(self.send)
        if widens:
            self.send = self._widened(self.send, reads=True, writes=False)
            self.recv = self._widened(self.recv, reads=in_place, writes=receives)

    def _packed(
        self, buffer: Buffer | None, borrow: bool, reads: bool, writes: bool
    ) -> Items | None:
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
            return buffer.view(borrow)
        blocks = buffer.blocks(borrow)
        packed = self._memory.empty(sum(b.size for b in blocks), buffer.items.dtype)
        ends = np.cumsum([b.size for b in blocks])
        for block, end in zip(blocks, ends.tolist()):
            self._stage(block, packed[end - block.size : end], reads, writes)
        return packed

    def _aside(self, items: Items | None) -> Items | None:
        """What is sent from memory that is received in, too: as it is before the run."""
        if items is None:
            return None
        copy = self._memory.empty(items.size, items.dtype)
        self._stage(items, copy, reads=True, writes=False)
        return copy

    def _widened(self, items: Items | None, reads: bool, writes: bool) -> Items | None:
        if items is None:
            return None
        wide = self._memory.empty(items.size, np.dtype(np.float32))
        self._stage(items, wide, reads, writes)
        return wide

    def _stage(self, outside: Items, inside: Items, reads: bool, writes: bool) -> None:
        if reads:
            self.before.append(partial(self._memory.convert, inside, outside))
        if writes:
            self.after.insert(0, partial(self._memory.convert, outside, inside))
