"""The methods of communicators and requests whose calls are recorded."""

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.calls.fast_path import nbytes_of
from collectives.calls.methods.blocking import Blocking
from collectives.calls.methods.derived import Nonblocking, Persistent
from collectives.calls.methods.objects import Objects
from collectives.run.record import CAME, WAITED, Recorder

_SENDS = "Send Ssend Bsend Rsend send ssend bsend Isend Issend Ibsend Irsend isend issend ibsend"
_STARTED = "Send_init Ssend_init Bsend_init Rsend_init"
_RECEIVES = "Recv recv Irecv irecv Recv_init"
#: Receives whose status comes when they are complete.
_LATE = ("Irecv", "irecv", "Recv_init")
#: Calls whose time is all that is recorded.
_ALONE = "Probe probe Mprobe mprobe Iprobe iprobe Create_group Create_intercomm Spawn"
#: Places of ``dest`` and ``source`` among the arguments, ``status`` being two behind ``source``.
_PLACES = {
    **dict.fromkeys(_ALONE.split(), (0, 0)),
    **dict.fromkeys(f"{_SENDS} {_STARTED}".split(), (1, 0)),
    **dict.fromkeys(_RECEIVES.split(), (0, 1)),
    **{"Sendrecv": (1, 4), "sendrecv": (1, 4), "Sendrecv_replace": (1, 3)},
}
_PEERS = (("dest", "sendtag"), ("source", "recvtag"))
_MADE = "Clone Dup Split Split_type Create Create_cart Create_graph Create_dist_graph"
_FORMS = {name for form in (Blocking, Nonblocking, Persistent, Objects) for name in vars(form)}
NAMES = [*(name for name in _FORMS if name[0] != "_"), *_PLACES, *_MADE.split()]
TOPOLOGY = ["Sub", *(name for name in dir(MPI.Topocomm) if "eighbor_" in name)]
_WAITS = "Wait wait Waitall waitall Waitany waitany Waitsome waitsome"
_OWN = ("collectives.virtual", "collectives.execution", "collectives.calls")
_TESTS = _WAITS.replace("Wait", "Test").replace("wait", "test")


class Numbers:
    """Numbers of the calls on a communicator, which all its ranks find alike.

    A message's is below 0; it is the first, second, ... of two ranks and a tag.
    """

    def __init__(self, comm: MPI.Intracomm, made: dict[tuple[int, ...], int]) -> None:
        group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
        members = tuple(group.Translate_ranks(None, world))
        group.Free()
        world.Free()
        made[members] = made.get(members, 0) + 1
        self.name, self.own = hash((made[members], *members)), comm.rank
        self.turns: dict[tuple[int, ...], int] = {}

    def next(self, *pair: int) -> int:
        """Number of the next call of all ranks, or of the next message of two."""
        self.turns[pair] = turn = self.turns.get(pair, 0) + 1
        number = abs(hash((self.name, *pair, turn)))
        return ~number if pair else number

    def of(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> list[int]:
        """Numbers of a call with these arguments."""
        if name not in _PLACES:
            return [self.next()]
        places = zip(_PLACES[name], _PEERS)
        dest, source = (_envelope(given, named, place, *words) for place, words in places)
        pairs = (self.own, *dest), (source[0], self.own, source[1])
        return [self.next(*pair) for pair in pairs if min(pair[:2]) >= 0]


def _envelope(
    given: tuple[Any, ...], named: dict[str, Any], place: int, *words: str
) -> tuple[int, int]:
    """Rank and tag of a message, from the arguments or the status; a rank below 0: none."""
    if not place:
        return -1, 0
    peer, tag = words
    usual = MPI.ANY_TAG if peer == "source" else 0
    rank = given[place] if len(given) > place else named.get(peer, MPI.ANY_SOURCE)
    place += 1
    tag = given[place] if len(given) > place else named.get(tag, named.get("tag", usual))
    if rank != MPI.ANY_SOURCE and tag != MPI.ANY_TAG:
        return rank, tag
    place += 1
    status = given[place] if len(given) > place else named.get("status")
    return (-1, 0) if status is None else (status.source, status.tag)


class Watch:
    """Makes classes of communicators and requests whose calls are recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.made: dict[tuple[int, ...], int] = {}
        self.kinds = {kind: self._request(kind) for kind in (MPI.Request, MPI.Prequest)}

    def communicator(self, base: type[Any]) -> type[Any]:
        """A subclass of a communicator's class, also for what is made of it."""
        watch = self

        class Watched(base):
            numbers: Numbers | None = None

            def __new__(cls, comm: Any = None, *given: Any, **named: Any) -> Any:
                own: Any = base.__new__(cls, comm, *given, **named)
                if comm is not None and comm != MPI.COMM_NULL:
                    own.numbers = Numbers(own, watch.made)
                return own

            def __init_subclass__(cls) -> None:
                watch.record(cls, TOPOLOGY)  # of our own class for a grid or a graph

        for name in ("__module__", "__qualname__", "__name__"):
            setattr(Watched, name, getattr(base, name))
        self.record(Watched, NAMES)
        return Watched

    def record(self, cls: type[Any], names: list[str]) -> None:
        """Records these methods of a class of communicators."""
        for name in names:
            if (method := getattr(cls, name, None)) is not None:
                setattr(cls, name, self._method(method, name))

    def _method(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A method of a communicator; a receive has a status, which says who has sent."""
        add, kinds, later = self.recorder.add, self.kinds, name.endswith("_init")
        source = 0 if later or name[0] in "Ii" else _PLACES.get(name, (0, 0))[1]
        ours = name in vars(Blocking)

        @wraps(method)
        def call(comm: Any, *given: Any, **named: Any) -> Any:
            if _is_own(frame := sys._getframe(1)):
                return method(comm, *given, **named)
            if source and len(given) <= source + 2 and named.get("status") is None:
                named["status"] = MPI.Status()
            begun = time.perf_counter()
            found = method(comm, *given, **named)
            of = partial(comm.numbers.of, name, given, named) if comm.numbers else list
            role, kind = CAME | WAITED, kinds.get(type(found))
            if kind is not None:
                role, found = CAME, kind(found)
                found.again, found.numbers = (of, []) if later else (list, of())
                if name in _LATE and _envelope(given, named, 1, *_PEERS[1])[0] < 0:
                    found.came = comm.numbers
            numbers = of() if kind is None else found.numbers
            site = add(frame, name, begun, numbers, role)
            site.nbytes += next(filter(None, map(named_bytes, (*given[:2], *named.values()))), 0)
            if ours and (plan := getattr(comm, "last_plan", None)) is not None:
                site.took[plan.algorithm, plan.reason] += 1
            return found

        return call

    def _request(self, kind: Any) -> Any:
        """A subclass of mpi4py's requests."""
        members: dict[str, Any] = {"__module__": kind.__module__}
        members |= {"numbers": [], "again": list, "came": None}
        for name in f"{_WAITS} {_TESTS} Start Startall".split():
            if method := getattr(kind, name, None):
                many = name.endswith(("all", "any", "some"))
                call = self._completion(method, name, many)
                members[name] = staticmethod(call) if many else call
        for name in ("fromhandle", "fromint", "f2py"):  # which make mpi4py's own class
            make = getattr(kind, name)
            members[name] = classmethod(lambda cls, of, make=make: cls(make(of)))

        def __reduce__(request: Any) -> Any:
            if request is MPI.REQUEST_NULL:
                return "REQUEST_NULL"
            make, (cls, _) = kind.__reduce__(request)
            return make, (cls, MPI.REQUEST_NULL)

        made = _Kind if type(kind) is type else type(kind)
        return made(kind.__name__, (kind,), {**members, "__reduce__": __reduce__})

    def _completion(self, method: Callable[..., Any], name: str, many: bool) -> Callable[..., Any]:
        """Start, Wait, Test or another, of one request or of many."""
        add, starts, ends = self.recorder.add, "Start" in name, name.lower() in ("wait", "waitall")
        role = CAME if starts else WAITED if name in _WAITS else 0
        several = name.lower().endswith(("all", "some"))
        word, one = "statuses" if several else "status", name.lower().endswith(("any", "some"))

        @wraps(method)
        def call(*given: Any, **named: Any) -> Any:
            if _is_own(frame := sys._getframe(1)):
                return method(*given, **named)
            told = given[1] if len(given) > 1 else named.get(word)
            if told is None and len(given) < 2 and not starts:
                told = named[word] = [] if several else MPI.Status()
            begun = time.perf_counter()
            found = method(*given, **named)
            numbers: list[int] = []
            requests = given[0] if given else named["requests"]
            requests = requests if many else (requests,)
            done = dict(_done(name, found, told))
            for place, request in enumerate(requests):
                came, status = getattr(request, "came", None), done.get(place)
                if came is not None and status is not None and status.source >= 0:
                    numbers.append(came.next(status.source, came.own, status.tag))
                if starts and hasattr(request, "again"):
                    request.numbers = request.again()
                own = getattr(request, "numbers", ())
                if own and (starts or ends or not request or (place in done and one)):
                    numbers += own
                    request.numbers = own if starts else []
            add(frame, name, begun, numbers, role)
            return found

        return call


def _done(name: str, found: Any, told: Any) -> Iterable[tuple[int, Any]]:
    """Places and statuses of the requests that a call has completed."""
    name, first = name.lower(), found[0] if isinstance(found, tuple) else found
    if told is None or "start" in name or (name in ("test", "testall") and not first):
        return ()  # an old status may be in the place of one
    if name.endswith("all"):
        return enumerate(told)
    if name.endswith("some"):
        return zip(first or (), told)
    return [(first if name.endswith("any") else 0, told)]


def named_bytes(spec: Any) -> int:
    """Bytes of a buffer, or of as many items of a type as it names."""
    if type(spec) in (list, tuple) and len(spec) > 2 and isinstance(spec[-1], MPI.Datatype):
        counts = spec[1][0] if isinstance(spec[1], tuple) else spec[1]
        if counts is not None:
            return int(np.sum(counts)) * spec[-1].Get_size()
    return nbytes_of(spec) or 0


def _is_own(frame: FrameType) -> bool:
    """Whether a call is made within another one."""
    return str(frame.f_globals.get("__package__")).startswith(_OWN)


class _Kind(type):
    """Class of requests; those of mpi4py's own, as of files, are instances as well."""

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, cls.__mro__[1])

    def __subclasscheck__(cls, kind: type[Any]) -> bool:
        return issubclass(kind, cls.__mro__[1])
