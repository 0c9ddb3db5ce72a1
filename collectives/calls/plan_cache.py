"""The plans of earlier calls, by the memory of these calls.

Parsing a call costs some 20 us; a loop that reduces one array again and again should pay that once.
So a blocking call is first looked up as the caller made it, by what its plan depends on and nothing
else: address, bytes and type of each buffer as they are *now*.  Which object names the memory plays
no part, nor whether the one of before is gone, was resized, or another one lies in its place: a
plan that is found is right for the memory that the caller holds.  Calls that take longer to read
are looked up once they are parsed.
"""

import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.algorithms import Algorithm
from collectives.calls.arguments import Arguments
from collectives.calls.fast_path import nbytes_of_tensor
from collectives.calls.mpi4py_spec import PREDEFINED
from collectives.calls.rendezvous import Location
from collectives.execution.plan import Plan
from collectives.execution.transport import Meeting

#: Largest number of calls, and of plans, that are kept; and bytes of a plan's own memory.
_MOST = 256
_MOST_PLANS = 64
_MOST_BYTES = 4 << 20
_address = MPI.Get_address

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class CachedCall:
    """A call that was made before.

    Attributes:
        op: the operation, kept lest another one comes to lie where it was.
        plan: its plan; ``None`` for the MPI library's own collective.
        location: this rank's part of the meeting; ``None`` if the ranks need not meet.
        meeting: the ranks' locations when they met; ``None`` for a nonblocking call.
        parsed: the key of a nonblocking call, whose plan is taken for one run at a time.
    """

    op: MPI.Op | None
    plan: Plan | None
    location: Location | None
    meeting: Meeting | None
    parsed: Key | None = None


class PlanCache:
    """The calls and plans of one communicator.

    ``parsed`` is the key of a parsed call.  ``where`` is where its memory lies: the places of all
    ranks' buffers for a blocking call, this rank's location for a nonblocking one, ``None`` in
    ordinary memory.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, CachedCall] = {}
        self._plans: OrderedDict[object, Plan] = OrderedDict()

    @staticmethod
    def key(arguments: Arguments, algorithm: Algorithm | str | None) -> Key | None:
        """Everything that the plan of a call depends on; ``None`` if the call must be parsed."""
        collective, sendbuf, recvbuf, op, root, vector, recvcounts = arguments
        if algorithm is not None and not isinstance(algorithm, (str, Algorithm)):
            return None
        if vector or recvcounts is not None or type(root) is not int:
            return None
        if isinstance(op, MPI.Op) and not op:  # freed, and still the one of its last plan
            return None
        try:
            send, recv = _memory(sendbuf, False), _memory(recvbuf, True)
        except (ValueError, BufferError):  # not contiguous, or of a type that has no buffer
            return None
        if send is None or recv is None:
            return None
        return collective, algorithm, id(op), root, send, recv

    def find(self, key: Key) -> CachedCall | None:
        """The call that was made before."""
        entry = self._entries.get(key)
        if entry is not None and entry.plan is not None and entry.plan.is_freed:
            return None
        return entry

    def remember(self, key: Key, entry: CachedCall) -> None:
        """Keeps a call, but nothing of its buffers."""
        if len(self._entries) >= _MOST:
            self._entries.clear()
        self._entries[key] = entry

    def take(self, parsed: Key | None, where: tuple[object, ...] | None) -> Plan | None:
        """The plan of such a call, which is not kept any more."""
        plan = self._plans.pop((parsed, where), None)
        return None if plan is None or plan.is_freed else plan

    def keep(self, parsed: Key | None, where: tuple[object, ...] | None, plan: Plan) -> bool:
        """Keeps a plan, if that pays: above some size, binding is cheap beside the transfer."""
        if parsed is None or (not where and plan.own_nbytes > _MOST_BYTES):
            return False
        self._plans[parsed, where] = plan
        if len(self._plans) > _MOST_PLANS:
            self._plans.popitem(last=False)[1].Free()
        return True

    def forget_calls(self) -> None:
        """Forgets where calls had their memory; the plans stay."""
        self._entries.clear()

    def free(self) -> None:
        """Forgets all calls, and frees their plans."""
        self._entries.clear()
        while self._plans:
            self._plans.popitem()[1].Free()

    def forget(self) -> None:
        """Lets go of everything as it is."""
        self._entries.clear()
        self._plans.clear()


def _memory(buffer: Any, writable: bool) -> tuple[object, ...] | None:
    """Address, bytes and type of an array of NumPy's or CuPy's, a tensor on the CPU, or mpi4py's
    ``buffer``; empty for ``MPI.IN_PLACE``, ``None`` for others.

    A buffer of the host may be followed by its count and a type of MPI's own, as in ``[array,
    MPI.FLOAT]``; other types can be freed, and their names given to new ones.
    """
    kind = type(buffer)
    if kind is np.ndarray:
        if writable and not buffer.flags.writeable:
            return None
        return _address(buffer), buffer.nbytes, buffer.dtype
    if buffer is None or buffer is MPI.IN_PLACE:
        return ()
    if kind is MPI.buffer:
        return None if writable and buffer.readonly else (buffer.address, buffer.nbytes, kind)
    if kind not in (list, tuple):
        if (nbytes := nbytes_of_tensor(buffer)) is not None:
            return buffer.data_ptr(), nbytes, buffer.dtype
        return _device_memory(buffer) or _python_memory(buffer, writable)
    if len(buffer) < 2:
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


def _python_memory(buffer: Any, writable: bool) -> tuple[object, ...] | None:
    """As :func:`_memory`, for what has Python's buffer protocol; ``None`` for others."""
    try:
        view = memoryview(buffer)
    except TypeError:
        return None
    if not view.c_contiguous or (writable and view.readonly):
        return None
    return _address(view), view.nbytes, view.format


def _device_memory(buffer: Any) -> tuple[object, ...] | None:
    """As :func:`_memory`, for CuPy's arrays; ``None`` for others."""
    cupy = sys.modules.get("cupy")
    if cupy is None or type(buffer) is not cupy.ndarray or not buffer.flags.c_contiguous:
        return None
    return "on a GPU", buffer.device.id, buffer.data.ptr, buffer.nbytes, buffer.dtype
