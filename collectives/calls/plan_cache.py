"""Calls on the same memory as before: blocking ones are found again without reading their buffers.

Reading a call costs some 20 us; a loop that reduces one array again and again should not pay that
in every turn.

A call is known by what its plan depends on, and by nothing else: address, bytes and type of each
buffer as they are *now*.  So it does not matter which object names the memory, whether the one of
before is gone, was resized, or another one lies in its place: a plan that is found is right for
the memory that the caller holds.
"""

import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.algorithms import Algorithm
from collectives.calls.arguments import Arguments
from collectives.calls.call import Call
from collectives.calls.mpi4py_spec import PREDEFINED
from collectives.execution.plan import Plan
from collectives.execution.transport.shared_memory import Meeting

#: Calls that are remembered, and plans that are kept, up to this size each.
_MOST = 256
_MOST_PLANS = 32
_MOST_BYTES = 4 << 20
_address = MPI.Get_address

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A call that was made before.

    Attributes:
        op: the operation, kept lest another one comes to lie where it was.
        plan: ``None`` for the MPI library's own collective.
        words: what this rank brings when the ranks meet; ``None`` if they need not meet.
        meeting: what all ranks brought when they met.
    """

    op: MPI.Op | None
    plan: Plan | None
    words: tuple[int, ...] | None
    meeting: Meeting | None


class Recent:
    """Calls by their memory."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}

    @staticmethod
    def key(arguments: Arguments, algorithm: Algorithm | str | None) -> Key | None:
        """What the plan of a call depends on; ``None`` where only a full reading can tell."""
        collective, sendbuf, recvbuf, op, root, vector, recvcounts = arguments
        if algorithm is not None and not isinstance(algorithm, (str, Algorithm)):
            return None
        if vector or recvcounts is not None or type(root) is not int:
            return None
        try:
            send, recv = _memory(sendbuf, False), _memory(recvbuf, True)
        except (ValueError, BufferError):  # not contiguous, or of a type that has no buffer
            return None
        if send is None or recv is None:
            return None
        return collective, algorithm, id(op), root, send, recv

    def find(self, key: Key) -> Entry | None:
        """The call that was made before."""
        entry = self._entries.get(key)
        if entry is not None and entry.plan is not None and entry.plan.is_freed:
            return None
        return entry

    def remember(self, key: Key, entry: Entry) -> None:
        """Keeps a call, but nothing of its buffers."""
        if len(self._entries) >= _MOST:
            self._entries.clear()
        self._entries[key] = entry

    def clear(self) -> None:
        """Forgets all."""
        self._entries.clear()


class Plans:
    """Plans of blocking or of nonblocking calls, for the next one that reads the same."""

    def __init__(self) -> None:
        self._plans: OrderedDict[object, Plan] = OrderedDict()

    def take(self, call: Call, where: tuple[object, ...] | None) -> Plan | None:
        """The plan of such a call, which is not kept any more.

        Args:
            where: its memory lies among the ranks' shared memory.
        """
        plan = self._plans.pop((call.key, where), None)
        return None if plan is None or plan.is_freed else plan

    def keep(self, call: Call, where: tuple[object, ...] | None, plan: Plan) -> bool:
        """Keeps a plan, if that pays: above some size, binding is cheap beside the transfer."""
        if call.key is None or (not where and plan.nbytes > _MOST_BYTES):
            return False
        self._plans[call.key, where] = plan
        if len(self._plans) > _MOST_PLANS:
            self._plans.popitem(last=False)[1].Free()
        return True

    def free(self) -> None:
        """Frees all."""
        while self._plans:
            self._plans.popitem()[1].Free()

    def forget(self) -> None:
        """Lets go of all as they are."""
        self._plans.clear()


def _memory(buffer: Any, writable: bool) -> tuple[object, ...] | None:
    """Where an array of NumPy's or CuPy's lies, and what it is; empty for ``MPI.IN_PLACE``,
    ``None`` for others.

    An array may be followed by its count and a type of MPI's own, as in ``[array, MPI.FLOAT]``;
    other types can be freed, and their names given to new ones.
    """
    kind = type(buffer)
    if kind is np.ndarray:
        if writable and not buffer.flags.writeable:
            return None
        return _address(buffer), buffer.nbytes, buffer.dtype
    if buffer is None or buffer is MPI.IN_PLACE:
        return ()
    if kind not in (list, tuple):
        return _device_memory(buffer)
    if len(buffer) < 2 or type(buffer[0]) is not np.ndarray:
        return None
    array, *rest = buffer
    described: tuple[object, ...] = ()
    for word in rest:
        if type(word) is int:
            described += (word,)
        elif type(word) is MPI.Datatype and word.handle in PREDEFINED:
            described += (MPI.Datatype, word.handle)
        else:
            return None
    memory = _memory(array, writable)
    return None if memory is None else (*memory, *described)


def _device_memory(buffer: Any) -> tuple[object, ...] | None:
    """The same of CuPy's arrays; ``None`` for what is none."""
    cupy = sys.modules.get("cupy")
    if cupy is None or type(buffer) is not cupy.ndarray or not buffer.flags.c_contiguous:
        return None
    return "on a GPU", buffer.device.id, buffer.data.ptr, buffer.nbytes, buffer.dtype
