"""Handles, buffers and requests of virtual ranks, by the names of MPI."""

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Self

import numpy as np
from mpi4py import MPI as library

from collectives.virtual.messages import MessageEnd
from collectives.virtual.rank import here

UNDEFINED = library.UNDEFINED


def lacks(name: str) -> Callable[..., NoReturn]:
    """A method that a virtual cluster does not have."""

    def method(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"a virtual cluster has no {name}: its ranks share no memory, and have messages of "
            "buffers and objects, and the collectives; start this program with mpirun"
        )

    method.__name__ = name
    return method


class _Kind(type):
    """A class of MPI: methods that it does not have say so when they are called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lacks(f"{cls.__name__}.{name}")


class Handled(metaclass=_Kind):
    """An object of MPI, which others may name by the same handle."""

    handle: Any = None

    def __new__(cls, other: "Handled | None" = None, *_: Any) -> Self:
        self = object.__new__(cls)
        self.handle = None if other is None else other.handle
        return self

    @classmethod
    def of(cls, handle: Any) -> Self:
        """The object of a handle."""
        made = cls.__new__(cls)
        made.handle = handle
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handled) and self.handle is other.handle

    def __hash__(self) -> int:
        return id(self.handle)

    def __bool__(self) -> bool:
        return self.handle is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self), name)

    def Free(self) -> None:
        self.handle = None


class Gapped:
    """Memory of the caller whose items have gaps; a message has its packed bytes."""

    def __init__(self, packed: Any, gaps: Any) -> None:
        self._packed, self._gaps = packed, gaps

    def __len__(self) -> int:
        return len(self._packed)

    def copy(self) -> Any:
        """The packed bytes."""
        self._gaps.pack(self._packed)
        return self._packed.copy()

    def __setitem__(self, part: slice, data: Any) -> None:
        self._gaps.pack(self._packed)  # numbers behind the message stay
        self._packed[part] = data
        self._gaps.unpack(self._packed)


def memory(spec: Any, writes: bool = False) -> Any:
    """The bytes of a buffer as mpi4py takes it, flat, or :class:`Gapped`.

    Raises:
        collectives.errors.InvalidBuffer: it is no contiguous buffer, or too short.
    """
    if spec is None:
        return np.empty(0, np.uint8)
    from collectives.calls.buffers import read_buffer  # starts MPI

    found = read_buffer(spec, "receive" if writes else "send", moves=True)
    packed = found.items.view(np.uint8)
    return Gapped(packed, found.gaps) if found.gaps else packed


class VirtualRequest(Handled):
    """An operation under way; its handle is an :class:`~collectives.virtual.rank.Operation`."""

    @property
    def running(self) -> Any:
        """The operation; ``None`` once it has ended."""
        return self.handle

    def Test(self, status: Any = None) -> bool:
        return self._is_done(here().attend()) and self._end(status)

    def Wait(self, status: Any = None) -> bool:
        if self.running is not None:
            here().wait(self.running)
        return self._end(status)

    def wait(self, status: Any = None) -> Any:
        operation = self.running
        self.Wait(status)
        found = getattr(operation, "result", None)
        return pickle.loads(found) if isinstance(found, bytes) else None

    def test(self, status: Any = None) -> tuple[bool, Any]:
        return (True, self.wait(status)) if self._is_done(here().attend()) else (False, None)

    @staticmethod
    def Testall(requests: Sequence["VirtualRequest"], statuses: Any = None) -> bool:
        now = here().attend()
        done = all(request._is_done(now) for request in requests)
        return done and VirtualRequest.Waitall(requests, statuses)

    @staticmethod
    def Waitall(requests: Sequence["VirtualRequest"], statuses: Any = None) -> bool:
        return all([one.Wait(status) for one, status in _each(requests, statuses)])

    @staticmethod
    def waitall(requests: Sequence["VirtualRequest"], statuses: Any = None) -> list[Any]:
        return [one.wait(status) for one, status in _each(requests, statuses)]

    @staticmethod
    def Testsome(requests: Sequence["VirtualRequest"], statuses: Any = None) -> list[int] | None:
        ended = VirtualRequest._ended(requests)
        for one, status in _each([requests[number] for number in ended or ()], statuses):
            one.Wait(status)
        return ended

    @staticmethod
    def Waitsome(requests: Sequence["VirtualRequest"], statuses: Any = None) -> list[int] | None:
        while (found := VirtualRequest.Testsome(requests, statuses)) == []:
            here().idle()
        return found

    @staticmethod
    def Testany(requests: Sequence["VirtualRequest"], status: Any = None) -> tuple[int, bool]:
        ended = VirtualRequest._ended(requests)
        if ended:
            requests[ended[0]].Wait(status)
        return (ended[0] if ended else UNDEFINED), ended != []

    @staticmethod
    def Waitany(requests: Sequence["VirtualRequest"], status: Any = None) -> int:
        while not (found := VirtualRequest.Testany(requests, status))[1]:
            here().idle()
        return found[0]

    @staticmethod
    def waitany(requests: Sequence["VirtualRequest"], status: Any = None) -> tuple[int, Any]:
        while (ended := VirtualRequest._ended(requests)) == []:
            here().idle()
        return (ended[0], requests[ended[0]].wait(status)) if ended else (UNDEFINED, None)

    @staticmethod
    def _ended(requests: Sequence["VirtualRequest"]) -> list[int] | None:
        """Numbers of those that are complete; ``None`` if none is under way."""
        running = [number for number, request in enumerate(requests) if request.running is not None]
        now = here().attend()
        return [n for n in running if requests[n]._is_done(now)] if running else None

    def _is_done(self, now: float) -> bool:
        running = self.running
        if running is None or (running.end is not None and running.end <= now):
            return True
        here().look()
        return False

    def _stop(self) -> None:
        self.handle = None

    def _end(self, status: Any) -> bool:
        operation = self.running
        if operation is not None:
            self._stop()
            if isinstance(operation, MessageEnd):
                operation.tell(status)
            if operation.error is not None:
                raise operation.error
        return True


def _each(requests: Sequence[VirtualRequest], statuses: Any) -> list[tuple[VirtualRequest, Any]]:
    """Requests with their statuses, which mpi4py adds where they are fewer."""
    if statuses is None:
        return [(request, None) for request in requests]
    statuses += [library.Status() for _ in requests[len(statuses) :]]
    return list(zip(requests, statuses, strict=False))


class Prequest(VirtualRequest):
    """A message that can be started again and again; its handle makes an end of it."""

    running: MessageEnd | None = None

    def Start(self) -> None:
        self.running = self.handle().post()

    @staticmethod
    def Startall(requests: Iterable["Prequest"]) -> None:
        for request in requests:
            request.Start()

    def _stop(self) -> None:
        self.running = None


class ProbedMessage(Handled):
    """A message that a probe has taken; its handle is the end that sends it."""

    def _taken(self, data: Any) -> VirtualRequest:
        send: MessageEnd = self.handle
        self.handle = None
        receive = MessageEnd(send.context, False, data, send.source, send.target, send.tag)
        send.meet(receive, here().arrive())
        return VirtualRequest.of(receive)

    def Irecv(self, buf: Any) -> VirtualRequest:
        return self._taken(memory(buf, True))

    def Recv(self, buf: Any, status: Any = None) -> None:
        self.Irecv(buf).Wait(status)

    def recv(self, status: Any = None) -> Any:
        return self._taken(None).wait(status)
