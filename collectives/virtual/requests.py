"""Handles and requests of virtual ranks, by the names of MPI."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn, Self

from mpi4py import MPI as library
from mpi4py.MPI import pickle

from collectives.virtual.buffers import memory
from collectives.virtual.messages import MessageEnd, write
from collectives.virtual.rank import Operation, here

UNDEFINED = library.UNDEFINED
#: Why a virtual cluster has no objects of a class of MPI's, and what a program does instead.
_WHY = {
    "Win": "each rank has a node to itself, and no memory is shared; send messages, or",
    "File": "no rank is a process that MPI could open files for; open one in Python, or",
    "MPI": "its objects are Python's, which no library in C knows;",
}
#: Numbers of an object for libraries in C and Fortran.
_OF_C = {"py2f", "f2py", "fromhandle", "handle", "toint", "fromint"}


def lacks(kind: str, name: str) -> Callable[..., NoReturn]:
    """A method that a virtual cluster does not have."""
    usual = "it has messages, collectives, grids and graphs of one job; use these, or"
    why = _WHY.get("MPI" if name in _OF_C else kind, usual)

    def method(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"a virtual cluster has no {kind}.{name}: {why} start this program with mpiexec"
        )

    method.__name__ = name
    return method


class _Kind(type):
    """A class of MPI: methods that it does not have say so when they are called, and attributes
    when they are read."""

    theirs: Any

    def __getattr__(cls, name: str) -> Any:
        if not hasattr(cls.theirs, name):
            raise AttributeError(f"{cls.theirs.__name__} has no {name}")
        own = name.removeprefix("Get_").replace("Is_", "is_")  # Get_size gives size
        if own != name and any(own in vars(base) for base in cls.__mro__):
            return lambda self: getattr(self, own)
        return lacks(cls.theirs.__name__, name)


class Handled(metaclass=_Kind):
    """An object of MPI, which others may name by the same handle.

    Attributes:
        held: its handle; ``None``: it is null.
        theirs: the class of mpi4py's whose place its class takes.
        null: MPI's error of null ones.
    """

    held: Any = None
    theirs: Any = library.Intracomm
    null: int = library.ERR_COMM

    def __new__(cls, other: "Handled | None" = None, *_: Any) -> Self:
        self = object.__new__(cls)
        self.held = None if other is None else other.held
        return self

    @classmethod
    def of(cls, handle: Any) -> Self:
        """The object of a handle."""
        made = cls.__new__(cls)
        made.held = handle
        return made

    @property
    def handle(self) -> Any:
        if self.held is None:
            raise library.Exception(self.null)
        return self.held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handled) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)

    def __bool__(self) -> bool:
        return self.held is not None

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self), name)
        return partial(method, self) if callable(getattr(self.theirs, name)) else method()

    def Free(self) -> None:
        self.held = None

    def free(self) -> None:
        """As mpi4py's: null ones and constants stay."""
        if self:
            self.Free()


class Begun(Operation):
    """A plan, or several requests, with ``Test`` and ``Wait``; it goes on within calls of MPI."""

    def __init__(self, plan: Any) -> None:
        super().__init__("is in a collective", list)
        self.plan = plan
        here().plans.append(plan)

    def is_done(self, now: float) -> bool:
        return bool(self.plan.Test())

    def wait(self) -> None:
        self.plan.Wait()


def _of_objects(method: Callable[..., Any], give: Callable[..., Any]) -> Any:
    """The form for objects of a method for buffers.

    ``give`` makes its result of the method's and of a function, which gives the objects of some
    requests, or of all.
    """

    def called(requests: Sequence["VirtualRequest"], statuses: Any = None) -> Any:
        running = {number: request.running for number, request in enumerate(requests)}
        told = method(requests, statuses)

        def objects(numbers: Iterable[int] = running) -> list[Any]:
            found = [getattr(running.get(number), "result", None) for number in numbers]
            return [pickle.loads(one) if isinstance(one, bytes) and one else None for one in found]

        return give(told, objects)

    return staticmethod(called)


class VirtualRequest(Handled):
    """An operation under way; its handle is an :class:`~collectives.virtual.rank.Operation`."""

    theirs, null = library.Request, library.ERR_REQUEST

    @property
    def running(self) -> Any:
        """The operation; ``None`` once it has ended."""
        return self.held

    def Test(self, status: Any = None) -> bool:
        return self.Get_status() and self._end(status)

    def Wait(self, status: Any = None) -> bool:
        if self.running is not None:
            self.running.wait()
        return self._end(status)

    def Get_status(self, status: Any = None) -> bool:
        return self._is_done(here().attend()) and self._tell(status)

    def Cancel(self) -> None:
        if isinstance(self.running, MessageEnd):
            self.running.cancel()

    get_status, cancel = Get_status, Cancel

    def wait(self, status: Any = None) -> Any:
        return self.waitall([self], [status])[0]

    def test(self, status: Any = None) -> tuple[bool, Any]:
        return (True, self.wait(status)) if self.Get_status() else (False, None)

    @staticmethod
    def Testall(requests: Sequence["VirtualRequest"], statuses: Any = None) -> bool:
        now = here().attend()
        done = all(request._is_done(now) for request in requests)
        return done and VirtualRequest.Waitall(requests, statuses)

    @staticmethod
    def Waitall(requests: Sequence["VirtualRequest"], statuses: Any = None) -> bool:
        return all([one.Wait(status) for one, status in _each(requests, statuses)])

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
        if ended != []:
            (requests[ended[0]] if ended else VirtualRequest()).Wait(status)
        return (ended[0] if ended else UNDEFINED), ended != []

    @staticmethod
    def Waitany(requests: Sequence["VirtualRequest"], status: Any = None) -> int:
        while not (found := VirtualRequest.Testany(requests, status))[1]:
            here().idle()
        return found[0]

    waitall = _of_objects(Waitall, lambda _, objects: objects())
    testall = _of_objects(Testall, lambda done, objects: (done, objects() if done else None))
    waitany = _of_objects(Waitany, lambda number, objects: (number, *objects([number])))
    testany = _of_objects(Testany, lambda told, objects: (*told, *objects(told[:1])))
    waitsome, testsome = (
        _of_objects(some, lambda told, objects: (told, None if told is None else objects(told)))
        for some in (Waitsome, Testsome)
    )

    @staticmethod
    def _ended(requests: Sequence["VirtualRequest"]) -> list[int] | None:
        """Numbers of those that are complete; ``None`` if none is under way."""
        running = [number for number, request in enumerate(requests) if request.running is not None]
        now = here().attend()
        return [n for n in running if requests[n]._is_done(now)] if running else None

    def _is_done(self, now: float) -> bool:
        if self.running is None or self.running.is_done(now):
            return True
        here().look(self.running)
        return False

    def _stop(self) -> None:
        self.held = None

    def _tell(self, status: Any) -> bool:
        getattr(self.running, "tell", write)(status)
        return True

    def _end(self, status: Any) -> bool:
        operation = self.running
        self._tell(status)
        if operation is not None:
            self._stop()
            if operation.error is not None:
                raise operation.error
        return True


def _each(requests: Sequence[VirtualRequest], statuses: Any) -> list[tuple[VirtualRequest, Any]]:
    """Requests with their statuses, which mpi4py adds where they are fewer."""
    if statuses is None:
        return [(request, None) for request in requests]
    if isinstance(statuses, list):
        statuses += [library.Status() for _ in requests[len(statuses) :]]
    return list(zip_longest(requests, statuses[: len(requests)]))


class Prequest(VirtualRequest):
    """An operation that can be started again and again; its handle begins it."""

    theirs = library.Prequest
    running: Operation | None = None

    def Start(self) -> None:
        self.running = self.handle()

    @staticmethod
    def Startall(requests: Iterable["Prequest"]) -> None:
        for request in requests:
            request.Start()

    def _stop(self) -> None:
        self.running = None


class Together(tuple[VirtualRequest, ...]):
    """Requests as one."""

    def Test(self) -> bool:
        return VirtualRequest.Testall(self)

    def Wait(self) -> None:
        VirtualRequest.Waitall(self)


def forms(begin: Callable[..., Operation], **fixed: Any) -> tuple[Any, Any, Any]:
    """The blocking, the nonblocking and the persistent form of what ``begin`` begins."""

    def blocking(*given: Any, **named: Any) -> None:
        VirtualRequest.of(begin(*given, **named, **fixed)).Wait()

    def nonblocking(*given: Any, **named: Any) -> VirtualRequest:
        return VirtualRequest.of(begin(*given, **named, **fixed))

    def persistent(*given: Any, info: Any = None, **named: Any) -> Prequest:
        return Prequest.of(partial(begin, *given, **named, **fixed))

    return blocking, nonblocking, persistent


class ProbedMessage(Handled):
    """A message that a probe has taken; its handle is the end that sends it."""

    theirs, null = library.Message, library.ERR_REQUEST

    Probe = probe = staticmethod(lambda comm, *given, **named: comm.Mprobe(*given, **named))
    Iprobe = iprobe = staticmethod(lambda comm, *given, **named: comm.Improbe(*given, **named))

    def _taken(self, data: Any) -> VirtualRequest:
        send: MessageEnd = self.handle
        if send.source == library.PROC_NULL:
            return VirtualRequest.of(send)
        self.held = None
        receive = MessageEnd(send.context, False, data, send.source, send.target, send.tag)
        send.meet(receive, here().arrive())
        return VirtualRequest.of(receive)

    def Irecv(self, buf: Any) -> VirtualRequest:
        return self._taken(memory(buf, True))

    def irecv(self) -> VirtualRequest:
        return self._taken(None)

    def Recv(self, buf: Any, status: Any = None) -> None:
        self.Irecv(buf).Wait(status)

    def recv(self, status: Any = None) -> Any:
        return self.irecv().wait(status)
