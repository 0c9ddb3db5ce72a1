"""Handles, buffers and requests of virtual ranks, by the names of MPI."""

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Self

import numpy as np
from mpi4py import MPI as library

from collectives.virtual.messages import MessageEnd
from collectives.virtual.rank import here


def lacks(name: str) -> Callable[..., NoReturn]:
    """A method that a virtual cluster does not have."""

    def method(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"a virtual cluster has no {name}: its ranks share no memory, and have messages of "
            "contiguous buffers, objects, and the collectives; start this program with mpirun"
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


def memory(spec: Any, writes: bool = False) -> Any:
    """The bytes of ``array``, ``[array, type]``, ``[array, count, type]`` and the like, flat.

    Raises:
        TypeError, BufferError: it is no contiguous buffer.
    """
    array, *words = spec if isinstance(spec, list | tuple) else [spec]
    if isinstance(array, library.BottomType):
        return Places(words[-1])
    if array is None:
        return np.empty(0, np.uint8)
    if not isinstance(array, np.ndarray):
        convert = np.asarray if hasattr(array, "__array__") else np.frombuffer
        array = convert(array) if convert is np.asarray else np.frombuffer(array, np.uint8)
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise BufferError("the buffer is not contiguous")
    if writes and not array.flags.writeable:
        raise BufferError("the buffer is read-only")
    flat = array.reshape(-1, order="A").view(np.uint8)
    if len(words) > 1 and isinstance(words[0], int | np.integer):
        flat = flat[: int(words[0]) * words[-1].Get_size()]
    return flat


class Places:
    """Bytes of several places in memory, which a type of MPI joins, like one flat array."""

    def __init__(self, joined: Any) -> None:
        """``joined``: a type of bytes by their addresses, of ``Create_hindexed``."""
        _, _, where = joined.decode()
        places = zip(where["displacements"], where["blocklengths"], strict=True)
        parts: list[Any] = [library.buffer.fromaddress(*place) for place in places]
        self._parts = [np.frombuffer(part, np.uint8) for part in parts]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def copy(self) -> Any:
        return np.concatenate(self._parts)

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.copy()

    def __setitem__(self, _: slice, values: Any) -> None:
        """Write ``values`` from the first byte on; bytes behind them stay."""
        left = np.asarray(values)
        for part in self._parts:
            part[: len(left)] = left[: len(part)]
            left = left[len(part) :]


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
    def Testall(requests: Iterable["VirtualRequest"], statuses: Any = None) -> bool:
        every, now = list(requests), here().attend()
        done = all(request._is_done(now) for request in every)
        return done and all(request._end(None) for request in every)

    @staticmethod
    def Waitall(requests: Iterable["VirtualRequest"], statuses: Any = None) -> bool:
        return all([request.Wait() for request in requests])

    @staticmethod
    def waitall(requests: Iterable["VirtualRequest"], statuses: Any = None) -> list[Any]:
        return [request.wait() for request in requests]

    @staticmethod
    def Testsome(requests: Sequence["VirtualRequest"], statuses: Any = None) -> list[int] | None:
        running = [number for number, request in enumerate(requests) if request.running is not None]
        now = here().attend()
        ended = [number for number in running if requests[number]._is_done(now)]
        for number in ended:
            requests[number]._end(None)
        return ended if running else None

    @staticmethod
    def Waitsome(requests: Sequence["VirtualRequest"], statuses: Any = None) -> list[int] | None:
        while (found := VirtualRequest.Testsome(requests)) == []:
            here().idle()
        return found

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
