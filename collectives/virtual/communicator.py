"""Groups and communicators of virtual ranks."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI as library
from mpi4py.MPI import pickle

from collectives.execution.memory import HOST
from collectives.virtual.buffers import blocks, memory, put
from collectives.virtual.context import Context, folded, joined
from collectives.virtual.point_to_point import VirtualMessages
from collectives.virtual.rank import Operation, here
from collectives.virtual.requests import UNDEFINED, Handled, Null, VirtualRequest, forms


class Group(Handled):
    """Ranks; its handle is their numbers in the job."""

    theirs, null = library.Group, Null(library.ERR_GROUP)

    @property
    def size(self) -> int:
        return len(self.handle)

    @property
    def rank(self) -> int:
        number = here().number
        return self.handle.index(number) if number in self.handle else UNDEFINED

    def Translate_ranks(
        self, ranks: Sequence[int] | None = None, group: "Group | None" = None
    ) -> list[int]:
        other = range(len(here().cluster.ranks)) if group is None else group.handle
        places = {number: place for place, number in enumerate(other)}
        own = range(self.size) if ranks is None else ranks
        nobody = library.PROC_NULL
        self.Incl([rank for rank in own if rank != nobody])  # raises where there is no such rank
        return [
            nobody if rank == nobody else places.get(self.handle[rank], UNDEFINED) for rank in own
        ]

    def Incl(self, ranks: Sequence[int]) -> "Group":
        if not all(0 <= rank < self.size for rank in ranks):
            raise library.Exception(library.ERR_RANK)
        return Group.of(tuple(self.handle[rank] for rank in ranks))

    def Excl(self, ranks: Sequence[int]) -> "Group":
        return Group.Difference(self, self.Incl(ranks))

    def Range_incl(self, ranks: Iterable[Any]) -> "Group":
        return self.Incl(_spread(ranks))

    def Range_excl(self, ranks: Iterable[Any]) -> "Group":
        return self.Excl(_spread(ranks))

    @staticmethod
    def Union(group1: "Group", group2: "Group") -> "Group":
        return Group.of(tuple(dict.fromkeys((*group1.handle, *group2.handle))))

    @staticmethod
    def Intersection(group1: "Group", group2: "Group") -> "Group":
        return Group.of(tuple(rank for rank in group1.handle if rank in group2.handle))

    @staticmethod
    def Difference(group1: "Group", group2: "Group") -> "Group":
        return Group.of(tuple(rank for rank in group1.handle if rank not in group2.handle))

    def Compare(self, group: "Group") -> int:
        return _compared(self.handle, group.handle, library.IDENT)

    def Dup(self) -> "Group":
        return Group.of(self.handle)

    Intersect = Intersection

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size


class Comm(VirtualMessages):
    """A communicator; its handle is a :class:`Context`."""

    is_topo, is_intra, is_inter, topology = False, True, False, library.UNDEFINED
    Create_keyval, Free_keyval = library.Comm.Create_keyval, library.Comm.Free_keyval
    Create_errhandler = library.Comm.Create_errhandler
    local = property(lambda self: self.handle.local(self.rank))

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

    def Get_topology(self) -> int:
        return self.topology

    def Is_inter(self) -> bool:
        return False

    def Is_intra(self) -> bool:
        return True

    def Compare(self, comm: "Comm") -> int:
        if self == comm:
            return library.IDENT
        return _compared(self.handle.members, comm.handle.members, library.CONGRUENT)

    def Free(self) -> None:
        if self.handle.name:
            raise library.Exception(library.ERR_COMM)
        if local := self.handle.locals.pop(self.rank, None):
            local.Free()
        super().Free()

    Disconnect = Free

    def Abort(self, errorcode: int = 0) -> NoReturn:
        raise SystemExit(errorcode)

    # Communicators of these ranks.

    def Split(self, color: Any = 0, key: int = 0) -> Any:
        """The communicator of the ranks of this colour, by rising keys."""
        members = self.handle.members

        def shared(parts: list[tuple[int, int]]) -> dict[int, Context]:
            order = sorted(range(len(parts)), key=lambda number: parts[number][1])
            return {
                colour: Context([members[n] for n in order if parts[n][0] == colour])
                for colour in {one[0] for one in parts}
            }

        found = self._meet("split", (color, key), lambda made, _: made[color], shared)
        return Intracomm.of(None if color == UNDEFINED else found)

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:
        color = {library.COMM_TYPE_SHARED: self.rank, UNDEFINED: UNDEFINED}
        return self.Split(color.get(split_type, 0), key)

    def Dup(self, info: Any = None) -> Any:
        made, request = Comm.Idup(self)
        request.Wait()
        return made

    Dup_with_info = Clone = Dup

    def Idup(self, info: Any = None) -> tuple[Any, VirtualRequest]:
        made, own = type(self).of(None), self.handle
        copied = self.local.Dup(info) if info or self.rank in own.locals else None

        def finish(context: Context, number: int) -> None:
            made.handle = context
            if copied:
                context.locals[number] = copied

        return made, VirtualRequest.of(
            own.meet("idup", b"", finish, lambda _: Context(own.members, own.topology))
        )

    Idup_with_info = Idup

    def Create(self, group: Group) -> Any:
        return self.Split(UNDEFINED if group.rank == UNDEFINED else 0, group.rank)

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        return Intracomm.of(self.handle.apart(group.handle, group.handle)).Dup()

    # Collectives of the library.

    def _meet(self, *given: Any) -> Any:
        pending = self.handle.meet(*given)
        VirtualRequest.of(pending).Wait()
        return pending.result

    def Ibarrier(self) -> VirtualRequest:
        return VirtualRequest.of(self.handle.meet("a barrier", b"", lambda *_: None))

    def Barrier(self) -> None:
        self.Ibarrier().Wait()

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any = library.SUM) -> VirtualRequest:
        from collectives.calls.buffers import read_buffer  # starts MPI
        from collectives.calls.call import combiner

        into = read_buffer(recvbuf, "receive")
        own = into if _in_place(sendbuf) else read_buffer(sendbuf, "send")
        kind = own.items.dtype
        combine = HOST.combine(combiner(op, kind, own.datatype))

        def join(left: Any, right: Any) -> Any:
            found = right.copy()
            combine(left.view(kind), right.view(kind), out=found.view(kind))
            return found

        def finish(total: Any, _: int) -> None:
            put(into.items.view(np.uint8), total)

        part = own.items.view(np.uint8).copy()
        pending = self.handle.meet("an all-reduce", part, finish, lambda all_: folded(all_, join))
        return VirtualRequest.of(pending)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = library.SUM) -> None:
        self.Iallreduce(sendbuf, recvbuf, op).Wait()

    def Iallgather(self, sendbuf: Any, recvbuf: Any, form: str = "") -> VirtualRequest:
        into = blocks(recvbuf, self.size, form, writes=True)
        own = into[self.rank] if _in_place(sendbuf) else memory(sendbuf)

        def finish(parts: list[Any], _: int) -> None:
            for block, part in zip(into, parts, strict=True):
                put(block, part)

        return VirtualRequest.of(self.handle.meet("an all-gather", own.copy(), finish))

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> VirtualRequest:
        return self.Iallgather(sendbuf, recvbuf, "v")

    def _alltoallw(self, sendbuf: Any, recvbuf: Any) -> Operation:
        peers, into = range(self.size), blocks(recvbuf, self.size, "w", writes=True)
        own = into if _in_place(sendbuf) else blocks(sendbuf, self.size, "w")
        return self._exchange([part.copy() for part in own], peers, into, peers)

    Alltoallw, Ialltoallw, Alltoallw_init = forms(_alltoallw)

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
        return [parts[own] for parts in self.allgather(self._one_for_each(sendobj))]

    def scatter(self, sendobj: Any = None, root: int = 0) -> Any:
        own = self._one_for_each(sendobj) if self.rank == root else None
        return self.bcast(own, root)[self.rank]

    def _one_for_each(self, objects: Any) -> list[Any]:
        found = list(objects)
        if len(found) != self.size:
            raise ValueError(f"expecting {self.size} items, got {len(found)}")
        return found

    def allreduce(self, sendobj: Any, op: Any = library.SUM) -> Any:
        return joined(self.allgather(sendobj), op)

    def reduce(self, sendobj: Any, op: Any = library.SUM, root: int = 0) -> Any:
        found = self.gather(sendobj, root)
        return None if found is None else joined(found, op)

    def scan(self, sendobj: Any, op: Any = library.SUM) -> Any:
        return joined(self.allgather(sendobj)[: self.rank + 1], op)

    def exscan(self, sendobj: Any, op: Any = library.SUM) -> Any:
        parts = self.allgather(sendobj)[: self.rank]
        return joined(parts, op) if parts else None


def _of_local(name: str) -> Any:
    """What MPI's own communicator of this rank alone has by this name."""
    if callable(getattr(library.Comm, name)):
        return lambda self, *given, **named: getattr(self.local, name)(*given, **named)
    return property(
        lambda self: getattr(self.local, name), lambda self, value: setattr(self.local, name, value)
    )


for _name in (
    *("Get_name", "Set_name", "name", "Get_info", "Set_info", "info"),
    *("Get_attr", "Set_attr", "Delete_attr"),
    *("Get_errhandler", "Set_errhandler", "Call_errhandler"),
):
    setattr(Comm, _name, _of_local(_name))


class Intracomm(Comm):
    """A communicator of one group."""


def _in_place(sendbuf: Any) -> bool:
    return sendbuf is library.IN_PLACE or sendbuf is None


def _spread(ranges: Iterable[Any]) -> list[int]:
    """The ranks of MPI's ranges: a rank, or the first, the last and a step."""
    found: list[int] = []
    for one in ranges:
        first, last, step = (*one, 1)[:3] if np.ndim(one) else (one, one, 1)
        found += range(first, last + (1 if step > 0 else -1), step)
    return found


def _compared(one: Sequence[int], other: Sequence[int], alike: int) -> int:
    if tuple(one) == tuple(other):
        return alike
    return library.SIMILAR if sorted(one) == sorted(other) else library.UNEQUAL
