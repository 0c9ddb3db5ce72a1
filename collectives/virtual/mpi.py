"""Messages and communicators of a virtual cluster, in the place of ``mpi4py.MPI``'s.

Types, operations and constants are mpi4py's own.  The library's own collectives are few, as those
of a program go by the package's algorithms; their sums have the order of recursive doubling, as
small ones of Open MPI and MPICH do.  Every rank has a node to itself.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Self, cast

import numpy as np
from mpi4py import MPI as library

from collectives.virtual.cluster import Operation, here

ANY_SOURCE, ANY_TAG, UNDEFINED = library.ANY_SOURCE, library.ANY_TAG, library.UNDEFINED


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


class MessageEnd(Operation):
    """An end of a message.

    Attributes:
        rank: the rank that has posted it.
        source, target, tag: numbers in the communicator; a receive's may be any.
        data: bytes to send, or memory to receive into; ``None``: what comes becomes ``result``.
        nbytes: length of the message.
    """

    def __init__(
        self, context: "Context", sends: bool, data: Any, source: int, target: int, tag: int
    ) -> None:
        peer, word = (target, "sends to") if sends else (source, "receives from")
        known = [context.members[peer]] if peer >= 0 else []
        whom = f"rank {known[0]}" if known else "any rank"
        which = "any tag" if tag == ANY_TAG else f"tag {tag}"
        super().__init__(f"{word} {whom} ({which})", lambda: known)
        self.rank, self.context, self.sends, self.data = here(), context, sends, data
        self.source, self.target, self.tag = source, target, tag
        self.nbytes = 0 if data is None else len(data)

    def post(self) -> "MessageEnd":
        """Starts it: the message begins when the other end is there."""
        now = self.rank.arrive()
        if library.PROC_NULL in (self.source, self.target):
            self.begun = self.end = now
            return self
        own, others = self.context.sends[self.target], self.context.receives[self.target]
        if not self.sends:
            own, others = others, own
        for other in others:
            send, receive = (self, other) if self.sends else (other, self)
            if receive.takes(send):
                others.remove(other)
                send.move(receive, now)
                return self
        own.append(self)
        if self.sends:  # for a probe
            self.rank.cluster.ranks[self.context.members[self.target]].note(now, self)
        return self

    def takes(self, send: "MessageEnd") -> bool:
        """Whether it receives that message."""
        return self.source in (ANY_SOURCE, send.source) and self.tag in (ANY_TAG, send.tag)

    def move(self, receive: "MessageEnd", now: float) -> None:
        """Carries the bytes over to the other end."""
        nbytes, target = self.nbytes, receive.rank.number
        begin, end = self.rank.cluster.transfer(self.rank.number, target, nbytes, now)
        if receive.data is None:
            receive.result = bytes(self.data)
        elif receive.nbytes < nbytes:
            receive.error = library.Exception(library.ERR_TRUNCATE)
        else:
            receive.data[:nbytes] = self.data
        receive.source, receive.tag, receive.nbytes = self.source, self.tag, nbytes
        for one in (self, receive):
            one.begun, one.end = begin, end
            one.rank.note(end, one)

    def tell(self, status: Any) -> None:
        """Writes where the message came from into a status of MPI."""
        if status is not None:
            status.source, status.tag = self.source, self.tag
            status.Set_elements(library.BYTE, self.nbytes)


class VirtualRequest(Handled):
    """An operation under way; its handle is a :class:`Operation`."""

    @property
    def running(self) -> Any:
        """The operation; ``None`` once it has ended."""
        return self.handle

    def Test(self, status: Any = None) -> bool:
        return self._is_done(here().arrive()) and self._end(status)

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
        return (True, self.wait(status)) if self._is_done(here().arrive()) else (False, None)

    @staticmethod
    def Testall(requests: Iterable["VirtualRequest"], statuses: Any = None) -> bool:
        every, now = list(requests), here().arrive()
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
        now = here().arrive()
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
        send.move(receive, here().arrive())
        return VirtualRequest.of(receive)

    def Irecv(self, buf: Any) -> VirtualRequest:
        return self._taken(memory(buf, True))

    def Recv(self, buf: Any, status: Any = None) -> None:
        self.Irecv(buf).Wait(status)

    def recv(self, status: Any = None) -> Any:
        return self._taken(None).wait(status)


class Context:
    """The messages and collectives under way on a communicator, which its ranks share.

    Attributes:
        members: their numbers in the job.
        numbers: the reverse.
        sends, receives: ends without the other end, by the rank that receives, oldest first.
        groups: contexts of members that make a communicator of their own.
        ours: the communicators whose algorithms serve these ranks.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self.numbers = {rank: number for number, rank in enumerate(members)}
        self.sends: list[deque[MessageEnd]] = [deque() for _ in members]
        self.receives: list[deque[MessageEnd]] = [deque() for _ in members]
        self.groups: dict[tuple[int, ...], Context] = {}
        self.ours: dict[int, Any] = {}
        self._met = [0] * len(self.members)
        #: By turn: the name, and by member the part and the operation.
        self._meetings: dict[int, tuple[str, dict[int, tuple[Any, Operation]]]] = {}

    def meet(
        self,
        what: str,
        brought: Any,
        finish: Callable[[Any, int], Any],
        shared: Callable[[list[Any]], Any] = lambda parts: parts,
    ) -> Operation:
        """A collective of the library begins on this rank.

        Args:
            what: its name, the same on all ranks.
            brought: this rank's part; bytes and arrays count in the time.
            finish: from ``shared(parts)`` of all parts and this rank's number to its result.

        Raises:
            RuntimeError: another rank makes another call.
        """
        rank = here()
        now, own = rank.arrive(), self.numbers[rank.number]
        turn = self._met[own]
        self._met[own] += 1
        first, came = self._meetings.setdefault(turn, (what, {}))
        if first != what:
            raise RuntimeError(
                f"rank {rank.number} calls {what} where rank {self.members[next(iter(came))]} has "
                f"called {first}, the collective number {turn + 1} of this communicator"
            )

        def missing() -> list[int]:
            return [other for number, other in enumerate(self.members) if number not in came]

        pending = Operation(f"is in {what}", missing, result=finish)
        came[own] = brought, pending
        if len(came) == len(self.members):
            del self._meetings[turn]
            parts = [came[number][0] for number in range(len(came))]
            given = shared(parts)
            nbytes = sum(len(part) for part in parts if isinstance(part, bytes | np.ndarray))
            end = now + rank.cluster.meeting(self.members, nbytes)
            for number, (_, one) in came.items():
                one.result, one.begun, one.end = one.result(given, number), now, end
                rank.cluster.ranks[self.members[number]].note(end, one)
        return pending


def folded(parts: Sequence[Any], join: Callable[[Any, Any], Any]) -> Any:
    """The sum of all parts in the order of recursive doubling."""
    found = list(parts)
    extra = len(found) - (1 << (len(found).bit_length() - 1))
    found[: 2 * extra] = [join(*found[at : at + 2]) for at in range(0, 2 * extra, 2)]
    while len(found) > 1:
        found = [join(*found[at : at + 2]) for at in range(0, len(found), 2)]
    return found[0]


class Group(Handled):
    """Ranks; its handle is their numbers in the job."""

    @property
    def size(self) -> int:
        return len(self.handle)

    @property
    def rank(self) -> int:
        number = here().number
        return self.handle.index(number) if number in self.handle else UNDEFINED

    def Translate_ranks(self, ranks: Sequence[int] | None, other: "Group") -> list[int]:
        places = {number: place for place, number in enumerate(other.handle)}
        own = range(self.size) if ranks is None else ranks
        return [places.get(self.handle[rank], UNDEFINED) for rank in own]

    def Incl(self, ranks: Sequence[int]) -> "Group":
        return Group.of(tuple(self.handle[rank] for rank in ranks))


class Comm(Handled):
    """A communicator; its handle is a :class:`Context`."""

    is_topo = is_inter = False

    @property
    def rank(self) -> int:
        return int(self.handle.numbers[here().number])

    @property
    def size(self) -> int:
        return len(self.handle.members)

    @property
    def group(self) -> Group:
        return Group.of(self.handle.members)

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Get_group(self) -> Group:
        return self.group

    def Get_attr(self, key: int) -> Any:
        return 1 << 30 if key == library.TAG_UB else None

    def Abort(self, errorcode: int = 0) -> NoReturn:
        raise SystemExit(errorcode)

    # Communicators of these ranks.

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """The communicator of the ranks of this colour, by rising keys."""
        members = self.handle.members

        def shared(parts: list[tuple[int, int]]) -> dict[int, Context]:
            order = sorted(range(len(parts)), key=lambda number: parts[number][1])
            return {
                colour: Context([members[n] for n in order if parts[n][0] == colour])
                for colour in {one[0] for one in parts}
            }

        found = self._meet("split", (color, key), lambda made, _: made[color], shared)
        return COMM_NULL if color == UNDEFINED else type(self).of(found)

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:
        return self.Split(self.rank if split_type == library.COMM_TYPE_SHARED else 0, key)

    def Dup(self, info: Any = None) -> Any:
        return self.Split(0, self.rank)

    Dup_with_info = Clone = Dup

    def Idup(self, info: Any = None) -> tuple[Any, VirtualRequest]:
        made, members = type(self).of(None), self.handle.members

        def finish(context: Context, _: int) -> None:
            made.handle = context

        return made, VirtualRequest.of(
            self.handle.meet("idup", b"", finish, lambda _: Context(members))
        )

    def Create(self, group: Group) -> Any:
        return self.Split(UNDEFINED if group.rank == UNDEFINED else 0, group.rank)

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        members = group.handle
        own = Intracomm.of(self.handle.groups.setdefault(members, Context(members)))
        return type(self).of(own.Dup().handle)

    # Messages.

    def _end(self, sends: bool, data: Any, peer: int, tag: int) -> MessageEnd:
        source, target = (self.rank, peer) if sends else (peer, self.rank)
        return MessageEnd(self.handle, sends, data, source, target, tag)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> VirtualRequest:
        return VirtualRequest.of(self._end(True, memory(buf), dest, tag).post())

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> VirtualRequest:
        return VirtualRequest.of(self._end(False, memory(buf, True), source, tag).post())

    def isend(self, obj: Any, dest: int, tag: int = 0) -> VirtualRequest:
        data = np.frombuffer(pickle.dumps(obj), np.uint8)
        return VirtualRequest.of(self._end(True, data, dest, tag).post())

    def irecv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG
    ) -> VirtualRequest:
        return VirtualRequest.of(self._end(False, None, source, tag).post())

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        self.Isend(buf, dest, tag).Wait()

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self.isend(obj, dest, tag).Wait()

    Issend = Ibsend = Irsend = Isend
    Ssend = Bsend = Rsend = Send
    issend = ibsend = isend
    ssend = bsend = send

    def Recv(
        self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> None:
        self.Irecv(buf, source, tag).Wait(status)

    def recv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> Any:
        return self.irecv(buf, source, tag).wait(status)

    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, *where: Any, **at: Any
    ) -> None:
        """``where`` and ``at``: source, recvtag and status, as mpi4py's."""
        self._both(self.Isend(sendbuf, dest, sendtag), self.Irecv, recvbuf, *where, **at)

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, *where: Any, **at: Any
    ) -> Any:
        return self._both(self.isend(sendobj, dest, sendtag), self.irecv, recvbuf, *where, **at)

    @staticmethod
    def _both(
        sent: VirtualRequest,
        receive: Callable[..., VirtualRequest],
        buf: Any,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Any = None,
    ) -> Any:
        found = receive(buf, source, recvtag).wait(status)
        sent.Wait()
        return found

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        data = memory(buf)
        return Prequest.of(lambda: self._end(True, data, dest, tag))

    Ssend_init = Bsend_init = Rsend_init = Send_init

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        data = memory(buf, True)
        return Prequest.of(lambda: self._end(False, data, source, tag))

    def _posted(self, source: int, tag: int, status: Any) -> MessageEnd | None:
        here().arrive()
        wanted = self._end(False, None, source, tag)
        for send in self.handle.sends[self.rank]:
            if wanted.takes(send):
                send.tell(status)
                return send
        here().look()
        return None

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        return self._posted(source, tag, status) is not None

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> ProbedMessage | None:
        if (send := self._posted(source, tag, status)) is None:
            return None
        self.handle.sends[self.rank].remove(send)
        return ProbedMessage.of(send)

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        while not self.Iprobe(source, tag, status):
            here().idle()
        return True

    def Mprobe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> ProbedMessage:
        while (found := self.Improbe(source, tag, status)) is None:
            here().idle()
        return found

    iprobe, improbe, probe, mprobe = Iprobe, Improbe, Probe, Mprobe

    # Collectives of the library.

    def _meet(self, *given: Any) -> Any:
        pending = self.handle.meet(*given)
        here().wait(pending)
        return pending.result

    def Ibarrier(self) -> VirtualRequest:
        return VirtualRequest.of(self.handle.meet("a barrier", b"", lambda *_: None))

    def Barrier(self) -> None:
        self.Ibarrier().Wait()

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any = library.SUM) -> VirtualRequest:
        out = memory(recvbuf, True)
        own = recvbuf if sendbuf is library.IN_PLACE or sendbuf is None else sendbuf
        array, *words = own if isinstance(own, list | tuple) else [own]

        def join(left: Any, right: Any) -> Any:
            found = right.copy()
            op.Reduce_local(*([one, words[-1]] if words else one for one in (left, found)))
            return found

        def finish(total: Any, _: int) -> None:
            out[:] = memory(total)

        parts = self.handle.meet(
            "an all-reduce", np.array(array), finish, lambda all_: folded(all_, join)
        )
        return VirtualRequest.of(parts)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = library.SUM) -> None:
        self.Iallreduce(sendbuf, recvbuf, op).Wait()

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> VirtualRequest:
        """``recvbuf``: an array, alone or with the counts of blocks that follow one another."""
        array, *words = recvbuf if isinstance(recvbuf, list | tuple) else [recvbuf]
        if len(words) > 1:
            lacks("Iallgatherv with displacements")()
        out = memory(array, True)

        def finish(parts: list[Any], _: int) -> None:
            found = np.concatenate(parts)
            out[: len(found)] = found

        return VirtualRequest.of(self.handle.meet("an all-gather", memory(sendbuf).copy(), finish))

    Iallgather = Iallgatherv

    # Collectives of objects.

    def barrier(self) -> None:
        self.Barrier()

    def allgather(self, sendobj: Any) -> list[Any]:
        every = self._meet("allgather", pickle.dumps(sendobj), lambda parts, _: parts)
        return [pickle.loads(part) for part in every]

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        own = pickle.dumps(obj) if self.rank == root else b""
        found = self._meet(f"bcast from {root}", own, lambda parts, _: parts[root])
        return obj if self.rank == root else pickle.loads(found)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        every = self._meet(f"gather to {root}", pickle.dumps(sendobj), lambda parts, _: parts)
        return [pickle.loads(part) for part in every] if self.rank == root else None

    def alltoall(self, sendobj: Any) -> list[Any]:
        own = self.rank
        return [parts[own] for parts in self.allgather(sendobj)]

    def scatter(self, sendobj: Any = None, root: int = 0) -> Any:
        return self.bcast(sendobj, root)[self.rank]

    def allreduce(self, sendobj: Any, op: Any = library.SUM) -> Any:
        return folded(self.allgather(sendobj), op)

    def reduce(self, sendobj: Any, op: Any = library.SUM, root: int = 0) -> Any:
        found = self.gather(sendobj, root)
        return None if found is None else folded(found, op)

    def scan(self, sendobj: Any, op: Any = library.SUM) -> Any:
        return folded(self.allgather(sendobj)[: self.rank + 1], op)

    def exscan(self, sendobj: Any, op: Any = library.SUM) -> Any:
        parts = self.allgather(sendobj)[: self.rank]
        return folded(parts, op) if parts else None


def _delegated(name: str) -> Callable[..., Any]:
    """A collective that goes by the package's algorithms, as messages."""

    def method(self: "Intracomm", *given: Any, **named: Any) -> Any:
        from collectives.communicator import Communicator

        ours = self.handle.ours
        if self.rank not in ours:
            ours[self.rank] = Communicator(cast(Any, Intracomm(self)))
        return getattr(ours[self.rank], name)(*given, **named)

    method.__name__ = name
    return method


class Intracomm(Comm):
    """A communicator."""


for _name in (
    *("Reduce_scatter_block", "Reduce_scatter", "Allgather", "Allgatherv", "Alltoall", "Alltoallv"),
    *("Bcast", "Reduce", "Gather", "Gatherv", "Scatter", "Scatterv", "Scan", "Exscan"),
):
    for _method in (_name, f"I{_name.lower()}"):
        if _method not in vars(Comm):
            setattr(Intracomm, _method, _delegated(_method))


class Topocomm(Intracomm):
    """A communicator with a topology, of which a virtual cluster has none."""


class Cartcomm(Topocomm):
    """A grid of ranks."""


class Graphcomm(Topocomm):
    """Ranks with edges."""


class Distgraphcomm(Topocomm):
    """Ranks with edges, known in part."""


class Win(Handled):
    """Memory that ranks share, of which a virtual cluster has none."""


class World(Intracomm):
    """All ranks of the cluster that this thread is of."""

    of: Any = Intracomm.of  # communicators that are made of it are plain
    handle = property(lambda self: here().cluster.world, lambda self, _: None)


class Alone(Intracomm):
    """The rank that this thread is."""

    of: Any = Intracomm.of
    handle = property(lambda self: here().alone, lambda self, _: None)


COMM_NULL, COMM_WORLD, COMM_SELF = Intracomm(), World(), Alone()
REQUEST_NULL = VirtualRequest()


def get_vendor() -> tuple[str, tuple[int, ...]]:
    """The name of this library, and its version."""
    return "virtual cluster", (1, 0, 0)


#: By the names of mpi4py, whose place they take.
NAMES = {
    **{kind.__name__: kind for kind in (Group, Comm, Intracomm, Topocomm, Cartcomm, Graphcomm)},
    **{"Distgraphcomm": Distgraphcomm, "Win": Win, "Request": VirtualRequest, "Prequest": Prequest},
    **{"Message": ProbedMessage, "COMM_NULL": COMM_NULL, "COMM_WORLD": COMM_WORLD},
    **{"COMM_SELF": COMM_SELF, "REQUEST_NULL": REQUEST_NULL, "get_vendor": get_vendor},
}
