"""Groups and communicators of virtual ranks."""

import pickle
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI as library

from collectives.execution.memory import HOST
from collectives.virtual.buffers import blocks, memory, put
from collectives.virtual.context import Context, folded, joined
from collectives.virtual.point_to_point import VirtualMessages
from collectives.virtual.rank import Operation, here
from collectives.virtual.requests import UNDEFINED, Handled, VirtualRequest, forms


class Group(Handled):
    """Ranks; its handle is their numbers in the job."""

    theirs = library.Group

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

    def Excl(self, ranks: Sequence[int]) -> "Group":
        return self.Incl([rank for rank in range(self.size) if rank not in ranks])

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size


class Comm(VirtualMessages):
    """A communicator; its handle is a :class:`Context`."""

    is_topo, is_intra, is_inter, topology = False, True, False, library.UNDEFINED

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

    def Get_attr(self, key: int) -> Any:
        return 1 << 30 if key == library.TAG_UB else None

    def Set_errhandler(self, errhandler: Any) -> None:
        """Does nothing: an error is an exception, and one that nobody catches ends all ranks."""

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
        return self.Split(self.rank if split_type == library.COMM_TYPE_SHARED else 0, key)

    def Dup(self, info: Any = None) -> Any:
        made, request = Comm.Idup(self)
        request.Wait()
        return made

    Dup_with_info = Clone = Dup

    def Idup(self, info: Any = None) -> tuple[Any, VirtualRequest]:
        made, own = type(self).of(None), self.handle

        def finish(context: Context, _: int) -> None:
            made.handle = context

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


class Intracomm(Comm):
    """A communicator of one group."""


def _in_place(sendbuf: Any) -> bool:
    return sendbuf is library.IN_PLACE or sendbuf is None
