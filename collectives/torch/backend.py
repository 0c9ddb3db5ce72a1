"""The backend as torch sees it: a ``Backend`` from torch 2.14 on, a ``ProcessGroup`` before."""

import atexit
import os
import threading
import zlib
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from time import sleep
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.errors import CollectiveError
from collectives.execution.progress import FORKED
from collectives.torch import NAME
from collectives.torch.calls import Calls
from collectives.torch.copies import Copies
from collectives.torch.devices import device_types
from collectives.torch.messages import MessageWork
from collectives.torch.monitored import monitored_barrier
from collectives.torch.order import AnyWork, CollectiveWork, DoneWork, Order
from collectives.torch.patches import (
    call_directly,
    hide_from_dynamo,
    serve_replicas,
    take_buffers_from_groups,
)
from collectives.torch.reductions import Reductions
from collectives.torch.register import version

#: torch's own classes, whose stubs know no subclasses.
_Backend: Any = torch._C._distributed_c10d.Backend
_ProcessGroup: Any = dist.ProcessGroup
#: Seconds between two looks of a group that ends at the others, and at messages.
_LOOK_SECONDS = 1e-4
#: Tags of the messages by which MPI makes a communicator are below this.
_TAGS = 32000


class Group(Reductions, Copies):
    """The part that both kinds have beside the operations.

    Args:
        comm: communicator of the group's ranks; it is freed with the group.
        timeout: as torch gives it; a negative one means no limit.
        store: torch's store of the group.
    """

    supports_splitting = supports_time_estimate = supports_coalescing = False

    def __init__(self, comm: Communicator, timeout: timedelta, store: Any) -> None:
        super().__init__(comm, _seconds(timeout), _order())
        self.store = store
        self._monitored = 0
        self._has_ended = False
        # At exit, as what is under way would meet the end of MPI; before the watchdog's farewell.
        # This keeps the object, too, which torch's wrapper with TORCH_DISTRIBUTED_DEBUG=DETAIL
        # does not.
        self._process = os.getpid()
        atexit.register(self._drain)

    def rank(self) -> int:
        return self.comm.rank

    def size(self) -> int:
        return self.comm.size

    def name(self) -> str:
        return NAME

    getRank, getSize, getBackendName, _get_backend_name = rank, size, name, name

    def set_timeout(self, timeout: timedelta) -> None:
        self.watchdog.timeout = _seconds(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier with a timeout, given as such or in options; rank 0 names who is missing."""
        given = getattr(timeout, "timeout", timeout)
        is_set = given is not None and given >= timedelta(0)
        seconds = given.total_seconds() if is_set else self.watchdog.timeout
        self.order.before_message()
        self._monitored += 1
        monitored_barrier(self.comm, self._monitored, seconds, wait_all_ranks)

    def abort(self) -> None:
        MPI.COMM_WORLD.Abort(1)

    def shutdown(self) -> None:
        """Ends the group, after what is under way.  Collective over its ranks; does nothing in a
        process that was forked.

        Raises:
            MismatchError: on all ranks: calls had other roots.
            Exception: a message or a call has failed for which nobody has waited.
        """
        # torch ends a group again whose end has failed.
        if self._has_ended or os.getpid() != self._process:
            return
        self._has_ended = True
        atexit.unregister(self._drain)
        try:
            self._drain()
        finally:  # where the other ranks are, too
            with self.watchdog.waiting("the end of the group", numbered=True):
                try:
                    # MPI may give a freed communicator's number to the next one, which would
                    # receive what is left here. A broadcast that is left cannot be taken out.
                    told = self._roots.told()
                    request = MPI.Intracomm.Iallreduce(self.comm, MPI.IN_PLACE, told, MPI.MIN)
                    self._drop_messages(request.Test)
                    self._roots.check(told)
                    self.comm.Free()
                finally:
                    self._node_memory.close()
                    self.watchdog.close()

    def _drain(self) -> None:
        """Carries out what is under way; does nothing in a process that was forked."""
        if os.getpid() == self._process and not MPI.Is_finalized():
            try:
                self.order.close()
            finally:
                if self._size > 1:  # alone, what has not come by now never comes
                    self._end_messages()

    def _end_messages(self) -> None:
        """Waits for the messages under way; drops those for nobody, whose senders wait, too."""
        with self.watchdog.waiting("messages at the end of the group", numbered=False):
            self._drop_messages(lambda: all([one.test() for one in list(self.under_way)]))
        with ExitStack() as ends:  # which goes on after an error
            for message in self.under_way:
                ends.callback(message.wait)

    def _drop_messages(self, is_over: Callable[[], bool]) -> None:
        """Receives the messages that nobody will receive, until something is over."""
        status = MPI.Status()
        while True:
            ends = is_over()
            while (message := self.comm.Improbe(status=status)) is not None:
                message.Recv(bytearray(status.Get_count(MPI.BYTE)))
            if ends:
                return
            sleep(_LOOK_SECONDS)


def _order() -> Order:
    """The order of a new group's collectives: its own, or the one of all groups without threads.

    Without threads a call that blocks must run those of all groups that came before it, as others
    may wait for them.
    """
    world, order = _world(), Order()
    return order if order.has_thread or world is None else world.order


def _seconds(timeout: timedelta) -> float:
    """Seconds of a timeout; torch's negative ones mean no limit."""
    seconds = timeout.total_seconds()
    return seconds if seconds > 0 else float(threading.TIMEOUT_MAX)


_KINDS = (Calls, Reductions, Copies)
hide_from_dynamo(Group, *_KINDS, AnyWork, DoneWork, CollectiveWork, MessageWork)


class MPIBackend(Group, _Backend):
    """A backend under torch's own group; other devices' backends stand beside it."""


class MPIProcessGroup(Group, _ProcessGroup):
    """The group itself, as torch before 2.14 knows no backend in Python."""

    group_name = group_desc = ""  # the class's own fail without a backend in C++

    def getGroupName(self) -> str:
        return self.group_name

    def setGroupName(self, name: str) -> None:
        self.group_name = name

    def getGroupDesc(self) -> str:
        return self.group_desc

    def setGroupDesc(self, text: str) -> None:
        self.group_desc = text

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in device_types()]

    def _get_backend(self, device: torch.device) -> "MPIProcessGroup":
        if torch.device(device).type not in device_types():
            raise RuntimeError(
                f"No backend type associated with device type {device}: torch makes one beside "
                f"{NAME} from 2.14 on"
            )
        return self

    def get_group_store(self) -> Any:
        return self.store

    def _has_hooks(self) -> bool:
        return False


def backend_of(group: Any) -> Group | None:
    """The backend of a group of torch's for tensors on the CPU; ``None`` if it is another one."""
    cpu = torch.device("cpu")
    found = group._get_backend(cpu) if cpu in group._device_types else None
    return found if isinstance(found, Group) else None


def _world() -> Group | None:
    """The backend of torch's world, once there is one."""
    return backend_of(dist.group.WORLD) if dist.is_initialized() else None


def create(options: Any, chosen: Any = None) -> Any:
    """The group that torch asks for by its ``DistributedBackendOptions``; on its ranks only.

    Args:
        options: torch's.
        chosen: the program's ``pg_options``.

    Raises:
        RuntimeError: torch and MPI do not count the same ranks.
        TypeError: there are ``pg_options``.
    """
    if chosen is not None:
        raise TypeError(f"pg_options={chosen!r}: a group of {NAME!r} takes none; leave them out")
    world, ranks = MPI.COMM_WORLD, list(options.global_ranks_in_group)
    given = options.group_rank, options.group_size
    if ranks:
        own = (ranks.index(world.rank), len(ranks)) if world.rank in ranks else None
    else:
        own = world.rank, world.size
    if given != own:
        raise RuntimeError(
            f"torch calls this process rank {given[0]} of {given[1]}, in a group of "
            f"{ranks or 'all'}; MPI calls it rank {world.rank} of {world.size}; start the program "
            "with mpirun or srun, not torchrun, and let mpi:// number the ranks"
        )
    return create_group(ranks, options.timeout, options.store)


def create_group(ranks: list[int], timeout: timedelta, store: Any) -> Any:
    """A group of these ranks of ``MPI.COMM_WORLD``, of all if there are none; on its ranks only."""
    world, first = MPI.COMM_WORLD, _world()
    if first:
        first.order.before_message()
    with first.watchdog.waiting("new_group", numbered=False) if first else nullcontext():
        if ranks:
            group = world.Get_group().Incl(ranks)
            # Not by torch's name of the group, in which may be how many groups this rank is in.
            made = world.Create_group(group, zlib.crc32(str(ranks).encode()) % _TAGS)
            group.Free()
        else:
            made = world.Dup()
        comm = Communicator(made)
        comm.prepare()  # else first calls of two groups, in another order on each rank, would hang
    take_buffers_from_groups()
    serve_replicas()
    if version() < (2, 14):  # which takes a backend that is written in Python
        return MPIProcessGroup(comm, timeout, store)
    call_directly(MPIBackend, _KINDS)
    return MPIBackend(comm, timeout, store)


def _in_child() -> None:
    """Lets calls of a process that a rank has forked raise; it would take the rank's messages."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise CollectiveError(FORKED)

    for name in ("_submit", "_message", "monitored_barrier"):
        setattr(Group, name, refuse)
    globals()["create_group"] = refuse


os.register_at_fork(after_in_child=_in_child)
