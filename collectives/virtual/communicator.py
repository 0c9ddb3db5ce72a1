"""Groups and communicators of virtual ranks."""

import sys
from collections.abc import Sequence
from functools import partialmethod
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI as library
from mpi4py.MPI import pickle

from collectives.execution.memory import HOST
from collectives.virtual.buffers import blocks, memory, put
from collectives.virtual.context import Context, folded, joined
from collectives.virtual.install import end_process
from collectives.virtual.point_to_point import VirtualMessages
from collectives.virtual.rank import Operation, here
from collectives.virtual.requests import UNDEFINED, Handled, VirtualRequest, forms


class Group(Handled):
    """Ranks; its handle is their numbers in the job."""

    theirs, null = library.Group, library.ERR_GROUP

    @property
    def size(self) -> int:
        return len(self.handle)

    @property
    def rank(self) -> int:
        number = here().number
        return self.handle.index(number) if number in self.handle else UNDEFINED

    def Translate_ranks(self, ranks: Any = None, group: "Group | None" = None) -> list[int]:
        other = here().cluster.world.members if group is None else group.handle
        places = {number: place for place, number in enumerate(other)}
        found = {rank: places.get(number, UNDEFINED) for rank, number in enumerate(self.handle)}
        found[library.PROC_NULL] = library.PROC_NULL
        return [found[rank] for rank in (range(self.size) if ranks is None else ranks)]

    def Incl(self, ranks: Sequence[int]) -> "Group":
        if not all(0 <= rank < self.size for rank in ranks):
            raise library.Exception(library.ERR_RANK)
        return Group.of(tuple(self.handle[rank] for rank in ranks))

    def Excl(self, ranks: Sequence[int]) -> "Group":
        return Group.Difference(self, self.Incl(ranks))

    def Union(self, group: "Group") -> "Group":
        return Group.of(tuple(dict.fromkeys((*self.handle, *group.handle))))

    def Intersection(self, group: "Group") -> "Group":
        return Group.of(tuple(rank for rank in self.handle if rank in group.handle))

    def Difference(self, group: "Group") -> "Group":
        return Group.of(tuple(rank for rank in self.handle if rank not in group.handle))

    def Compare(self, group: "Group") -> int:
        return _compared(self.handle, group.handle, library.IDENT)


class Comm(VirtualMessages):
    """A communicator; its handle is a :class:`Context`."""

    kind = library.UNDEFINED
    topology = property(lambda self: self.handle and self.kind)
    is_topo = property(lambda self: self.topology != library.UNDEFINED)
    is_intra = property(lambda self: bool(self.handle))
    is_inter = property(lambda self: not self.handle)
    Create_keyval, Free_keyval = library.Comm.Create_keyval, library.Comm.Free_keyval

    @property
    def size(self) -> int:
        return len(self.handle.members)

    @property
    def group(self) -> Group:
        return Group.of(self.handle.members)

    def Compare(self, comm: "Comm") -> int:
        alike = library.IDENT if self == comm else library.CONGRUENT
        return _compared(self.handle.members, comm.handle.members, alike)

    def Free(self) -> None:
        if local := self.handle.locals.pop(self.rank, None):
            local.Free()
        super().Free()

    Disconnect = Free
    name = property(lambda self: self.Get_name(), lambda self, name: self.Set_name(name))
    info = property(lambda self: self.Get_info(), lambda self, info: self.Set_info(info))

    @property
    def local(self) -> Any:
        """MPI's own communicator of this rank alone, and its null one of a null one."""
        if not self:
            return library.COMM_NULL
        found = self.handle.locals
        return found.get(self.rank) or found.setdefault(self.rank, library.COMM_SELF.Dup())

    def Get_attr(self, keyval: int) -> Any:
        is_world = self and keyval == library.TAG_UB
        return (library.COMM_WORLD if is_world else self.local).Get_attr(keyval)

    def __getattr__(self, name: str) -> Any:
        is_local = name.endswith(("_name", "_info", "_attr", "_errhandler"))
        return getattr(self.local, name) if is_local else super().__getattr__(name)

    def Abort(self, errorcode: int = 0) -> NoReturn:
        print(f"virtual rank {here().number} calls Abort({errorcode}): all end", file=sys.stderr)
        end_process(errorcode)

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
        made, request = Comm.Idup(self, info)
        request.Wait()
        return made

    Dup_with_info = Clone = Dup

    def Idup(self, info: Any = None) -> tuple[Any, VirtualRequest]:
        made, own = type(self).of(None), self.handle
        copied = self.local.Dup(info) if info or self.rank in own.locals else None

        def finish(context: Context, number: int) -> None:
            made.held = context
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

    Barrier, Ibarrier, _ = forms(lambda self: self.handle.meet("a barrier", b"", lambda *_: None))
    barrier = Barrier

    def _allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = library.SUM) -> Operation:
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
        share = 2 * (self.size - 1) / self.size**2  # as a reduce-scatter and an all-gather
        return self.handle.meet(
            "an all-reduce", part, finish, lambda all_: folded(all_, join), share
        )

    Allreduce, Iallreduce, _ = forms(_allreduce)

    def Iallgather(self, sendbuf: Any, recvbuf: Any, form: str = "") -> VirtualRequest:
        into = blocks(recvbuf, self.size, form, writes=True)
        own = into[self.rank] if _in_place(sendbuf) else memory(sendbuf)

        def finish(parts: list[Any], _: int) -> None:
            for block, part in zip(into, parts, strict=True):
                put(block, part)

        return VirtualRequest.of(self.handle.meet("an all-gather", own.copy(), finish))

    Iallgatherv = partialmethod(Iallgather, form="v")

    def _alltoallw(self, sendbuf: Any, recvbuf: Any) -> Operation:
        peers, into = range(self.size), blocks(recvbuf, self.size, "w", writes=True)
        own = into if _in_place(sendbuf) else blocks(sendbuf, self.size, "w")
        return self._exchange([part.copy() for part in own], peers, into, peers)

    Alltoallw, Ialltoallw, Alltoallw_init = forms(_alltoallw)

    # Collectives of objects.

    def _all(self, what: str, sendobj: Any, share: float = 1.0, root: int | None = None) -> Any:
        """All objects, on the root alone if there is one."""
        every = self._meet(what, pickle.dumps(sendobj), lambda parts, _: parts, list, share)
        return [pickle.loads(part) for part in every] if root in (None, self.rank) else None

    def allgather(self, sendobj: Any) -> list[Any]:
        found: list[Any] = self._all("allgather", sendobj)
        return found

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        self._check(root)
        own = pickle.dumps(obj) if self.rank == root else b""
        found = self._meet(f"bcast from {root}", own, lambda parts, _: parts[root])
        return obj if self.rank == root else pickle.loads(found)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        self._check(root)
        found: list[Any] | None = self._all(f"gather to {root}", sendobj, root=root)
        return found

    def alltoall(self, sendobj: Any) -> list[Any]:
        own, given = self.rank, self._one_for_each(sendobj)
        return [parts[own] for parts in self._all("alltoall", given, 1 / self.size)]

    def scatter(self, sendobj: Any = None, root: int = 0) -> Any:
        own = self._one_for_each(sendobj) if self.rank == root else None
        return self.bcast(own, root)[self.rank]

    def _check(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise library.Exception(library.ERR_ROOT)

    def _one_for_each(self, objects: Any) -> list[Any]:
        found = list(objects)
        if len(found) != self.size:
            raise ValueError(f"expecting {self.size} items, got {len(found)}")
        return found

    def _summed(self, what: str, sendobj: Any, trees: int = 1, root: int | None = None) -> Any:
        """All objects, whose sums go through binomial trees, one whole object in a round."""
        return self._all(what, sendobj, trees * (self.size - 1).bit_length() / self.size, root)

    def allreduce(self, sendobj: Any, op: Any = library.SUM) -> Any:
        return joined(self._summed("allreduce", sendobj, 2), op)

    def reduce(self, sendobj: Any, op: Any = library.SUM, root: int = 0) -> Any:
        self._check(root)
        found = self._summed(f"reduce to {root}", sendobj, root=root)
        return None if found is None else joined(found, op)

    def scan(self, sendobj: Any, op: Any = library.SUM) -> Any:
        return joined(self._summed("scan", sendobj)[: self.rank + 1], op)

    def exscan(self, sendobj: Any, op: Any = library.SUM) -> Any:
        parts = self._summed("exscan", sendobj)[: self.rank]
        return joined(parts, op) if parts else None


class Intracomm(Comm):
    """A communicator of one group."""


def _in_place(sendbuf: Any) -> bool:
    return sendbuf is library.IN_PLACE or sendbuf is None


def _compared(one: Sequence[int], other: Sequence[int], alike: int) -> int:
    if tuple(one) == tuple(other):
        return alike
    return library.SIMILAR if sorted(one) == sorted(other) else library.UNEQUAL
