"""A communicator's duplicate, shared memory, tuning table and GPUs."""

import logging
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from collectives import extras
from collectives.calls.buffer_protocols import read_shape, read_type
from collectives.calls.choice import Table
from collectives.calls.devices import Devices
from collectives.calls.settings import Settings
from collectives.calls.tables import load
from collectives.clocks import clock
from collectives.errors import CollectiveError, InvalidBuffer
from collectives.execution.memory import Items
from collectives.execution.messages import TAGS_PER_PLAN
from collectives.execution.progress import Progress
from collectives.execution.tags import Mask, TagPool, Tags
from collectives.execution.transport.mpi import MPITransport, largest_tag
from collectives.execution.waiting import wait_for
from collectives.schedule import Schedule

if TYPE_CHECKING:
    from collectives.execution.slot_rounds import Extent
    from collectives.execution.transport.shared_memory import NodeMemory
    from collectives.execution.transport.slots import Slots


log = logging.getLogger("collectives")


class Resources:
    """The resources of one communicator; each is made at its first use, which is collective.

    Attributes:
        given: the caller's communicator.
        devices: the GPUs, where buffers are on them.
        node: memory that all ranks can address, once some was asked for and can be had.
        progress: the communicator's plans that are under way.
        is_even: whether all nodes have as many ranks, numbered node by node; known with ``facts``.
    """

    def __init__(self, comm: MPI.Intracomm, settings: Settings) -> None:
        self.given = comm
        self.settings = settings
        self.progress = Progress()
        self.node: NodeMemory | None = None
        self.tags = TagPool(min(largest_tag() // TAGS_PER_PLAN - 1, 1 << 30))
        self._transport: MPITransport | None = None
        self._slots: Slots | None = None
        self._has_slots = not settings.needs_messages
        self._extents: dict[tuple[object, ...], Extent] = {}
        # No cached_property: before Python 3.12, one lock of all communicators is held in it, and
        # ranks that come to two communicators in another order would wait for one another.
        self._ranks_per_node: int | None = None
        self.is_even = True
        self._table: Table | None = None
        self.devices = Devices(self)

    @property
    def comm(self) -> MPI.Intracomm:
        """The caller's communicator, as it is now: one that ``Idup`` makes comes to life later, and
        the caller may free it."""
        return MPI.Intracomm(self.given)

    @property
    def facts(self) -> tuple[int, Table]:
        """Ranks of the fullest node, and the tuning table, which ``auto`` goes by.

        In one place, as finding each of them is collective, and ranks that ask for them in another
        order would wait for one another.
        """
        return self.ranks_per_node, self.table

    def prepare(self) -> None:
        """Makes what calls in the host's ordinary memory need; collective."""
        _ = self.facts, self.transport

    @property
    def transport(self) -> MPITransport:
        """Messages on a duplicate of the communicator, where they cannot meet the caller's."""
        if self._transport is None:
            # Another rank may wait for a plan of ours on another communicator before it comes here.
            try:
                self.wait(self.comm.Ibarrier())
                # A duplicate would have the caller's attributes.
                channel = MPI.Intracomm(self.comm.Split(0, self.comm.rank))
            except MPI.Exception as error:
                if error.Get_error_class() != MPI.ERR_OTHER:
                    raise
                raise CollectiveError(
                    "the MPI library cannot duplicate this communicator; MPICH has room for 2,048: "
                    "close() or Free() those that the program no longer uses"
                ) from error
            except BaseException as error:  # a signal handler's, on this rank alone
                self.progress.leave("the making of a communicator for messages", error)
                raise
            if self.settings.transport.delays:
                self._expect_one_clock(channel)
            self._transport = self.settings.transport(channel)
        return self._transport

    def _expect_one_clock(self, channel: MPI.Intracomm) -> None:
        """Raises on all ranks if messages cannot say when they are due."""
        clocks = np.array([clock(), -clock()])
        self.wait(channel.Iallreduce(MPI.IN_PLACE, clocks, MPI.MAX))
        if clocks[0] != -clocks[1]:
            raise CollectiveError(
                "messages that arrive late need ranks that see one clock, and these are on several "
                "machines; start them on one, or shape the real links and leave COLLECTIVES_LINK "
                "and delayed() out"
            )

    @property
    def channel(self) -> MPI.Intracomm:
        return self.transport.channel

    def wait(self, request: MPI.Request) -> None:
        """Waits for a request, and moves the plans under way along meanwhile."""
        try:
            wait_for(request.Test, self.progress.advance)
        except BaseException as error:  # raised by a signal handler
            self.progress.leave("an agreement of the ranks", error)
            self.progress.keep(request)
            raise

    def gathered(self, mine: Any) -> list[Any]:
        """The objects that all ranks pass; collective."""
        pickled, channel = np.frombuffer(pickle.dumps(mine), np.uint8), self.channel
        lengths = np.empty(channel.size, np.int64)
        self.wait(channel.Iallgather(np.array([pickled.size]), lengths))
        told = np.empty(lengths.sum(), np.uint8)
        self.wait(channel.Iallgatherv(pickled, [told, lengths]))
        return [pickle.loads(part.tobytes()) for part in np.split(told, np.cumsum(lengths)[:-1])]

    def take_tags(self) -> Tags:
        """Tags that no other plan has; collective.

        Raises:
            CollectiveError: on all ranks, if there are more plans than tags.
        """
        tags = self.tags.take(self.used_anywhere)
        if tags is None:
            raise CollectiveError(
                f"there are {self.tags.most} plans on this communicator, and this MPI has no tags "
                "for more; Free some"
            )
        return tags

    def used_anywhere(self, used: Mask) -> Mask:
        """The numbers that any rank uses; collective."""
        self.wait(self.channel.Iallreduce(MPI.IN_PLACE, used, MPI.BOR))
        return used

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on the fullest node."""
        if self._ranks_per_node is None:
            self.progress.drain()
            node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
            ranks = node.allgather(self.comm.rank)
            told = np.array([node.size, -node.size, ranks[-1] - ranks[0]])
            self.comm.Allreduce(MPI.IN_PLACE, told, MPI.MAX)
            self._ranks_per_node = most = int(told[0])
            self.is_even = told.tolist() == [most, -most, most - 1]
            node.Free()
        return self._ranks_per_node

    @property
    def table(self) -> Table:
        """The tuning table, as rank 0 finds it."""
        if self._table is not None:
            return self._table
        self.progress.drain()
        told: Table | CollectiveError | None = None
        try:
            told = load(self.settings.tuning) if self.comm.rank == 0 else None
        except CollectiveError as error:
            told = error
        told = self.comm.bcast(told)
        if not isinstance(told, Table):
            raise told or CollectiveError("rank 0 has no tuning table")
        self._table = told
        return told

    @property
    def handed_on(self) -> Settings:
        """The settings of communicators that are made of this one, with findings about the GPUs."""
        return self.settings._replace(device=self.devices.way)

    def empty(self, shape: Any, dtype: Any, memory: str) -> Items:
        """Zeros in the node's memory, or in ordinary memory where that cannot be; arguments and
        errors as of :meth:`collectives.Communicator.empty`."""
        alone = self._alone
        problem: Exception | None = None
        try:
            if memory not in ("numpy", "cupy"):
                raise InvalidBuffer(f'memory={memory!r} is neither "numpy" nor "cupy"')
            kind = self.devices.memory(extras.CudaMemory().gpu if memory == "cupy" else None)
            dtype = read_type(dtype)
            dimensions = read_shape(shape, dtype)
            if dtype.subdtype is not None:  # as of NumPy, its axes come behind the others
                dtype, inner = dtype.subdtype
                dimensions += inner
            items = kind.zeros(dimensions, dtype) if alone else None
        except Exception as error:  # the other ranks learn of any error
            problem = error
        memories = self.agreed("Communicator.empty", problem, memory)
        if len(ranks := {each: memories.index(each) for each in memories}) > 1:
            calls = ", ".join(f'rank {rank} with memory="{each}"' for each, rank in ranks.items())
            raise InvalidBuffer(f"Communicator.empty, {calls}: call it alike on all ranks")
        if items is not None:
            log.info("ordinary memory instead of shared: %s", alone)
            return items
        try:
            return self._made_node().empty(dimensions, dtype, kind)
        except InvalidBuffer as error:  # on all ranks
            log.warning("ordinary memory instead of shared: %s", error)
        try:
            items = kind.zeros(dimensions, dtype)
        except MemoryError as error:
            problem = error
        self.agreed("Communicator.empty", problem)
        assert items is not None, "without a problem there is an array"
        return items

    def _made_node(self) -> "NodeMemory":
        self.node = self.node or extras.NodeMemory(self.channel)
        return self.node

    def move(self, storage: Any) -> None:
        """Has torch move a storage of each rank into the node's memory, where that can be.
        Collective."""
        if self._alone:
            return
        try:
            self._made_node().move(storage)
        except (InvalidBuffer, MemoryError) as error:  # on all ranks
            log.warning("a bucket of DDP's stays in ordinary memory: %s", error)

    @property
    def slots(self) -> "Slots | None":
        """Slots for ordinary arrays, where ranks share nodes.  Collective at first use."""
        if self._has_slots and self._slots is None:
            # Another rank may wait for a plan of ours before it comes here.
            self.wait(self.channel.Ibarrier())
            self._has_slots = self.ranks_per_node > 1
            try:
                self._slots = self._made_slots() if self._has_slots else None
            except (InvalidBuffer, MemoryError) as error:  # on all ranks
                log.warning("messages instead of slots: %s", error)
                self._has_slots = False
            except BaseException as error:  # a signal handler's, on this rank alone
                self.progress.leave("the making of slots", error)
                raise
        return self._slots

    def _made_slots(self) -> "Slots":
        """Slots of the ranks of this node; errors are raised on all ranks of all nodes."""
        comm, problem = self.channel, None
        if self.ranks_per_node < comm.size:
            comm = MPI.Intracomm(self.comm.Split_type(MPI.COMM_TYPE_SHARED))
        try:
            made = extras.Slots(
                extras.NodeMemory(comm), comm.allgather(self.comm.rank), self.transport
            )
        except (InvalidBuffer, MemoryError) as error:  # on all ranks of the node
            problem = error
        self.agreed("slots", problem)
        return made

    def extent(self, schedule: Schedule, name: tuple[str, ...]) -> "Extent":
        """The extent of a schedule, by names that no other one has.  Collective at first use."""
        key = schedule.collective, name, schedule.chunks, schedule.root
        if key not in self._extents:
            most = np.array(extras.extent_of(schedule, [self.comm.rank]))
            self.wait(self.channel.Iallreduce(MPI.IN_PLACE, most, MPI.MAX))
            self._extents[key] = extras.Extent(*most.tolist())
        return self._extents[key]

    @property
    def _alone(self) -> str:
        """Why arrays cannot be shared, whatever the memory, or nothing; the same on all ranks."""
        if self.ranks_per_node < self.comm.size:
            return "the ranks are on several nodes"
        if self.settings.has_checksums:
            return "messages have checksums"
        return "messages are delayed" if self.settings.needs_messages else ""

    def agreed(self, what: str, problem: Exception | None, mine: Any = None) -> list[Any]:
        """Values that the ranks pass as ``mine``, unless one has a problem.  Collective.

        Raises:
            MemoryError: on all ranks, if memory is all that lacks on some.
            InvalidBuffer: on all ranks, if there is another problem.
        """
        own = None
        if problem is not None:
            known = isinstance(problem, CollectiveError | MemoryError)
            text = str(problem) if known else f"{type(problem).__name__}: {problem}"
            own = text, isinstance(problem, MemoryError)
        every = self.gathered((own, mine))
        told = [(rank, one) for rank, (one, _) in enumerate(every) if one]
        if told:
            first: dict[str, int] = {}
            for rank, (text, _) in told:
                first.setdefault(text, rank)
            problems = "; ".join(f"rank {rank}: {text}" for text, rank in [*first.items()][:3])
            kind = MemoryError if all(lacks for _, (_, lacks) in told) else InvalidBuffer
            raise kind(f"{what}: {problems}")
        return [word for _, word in every]

    def revoke(self) -> None:
        """Ends all waits in the duplicate, and lets go of it."""
        self.devices.revoke()
        if self._slots is not None:
            self._slots.node.comm.Revoke()
            self._slots = None
        self.node = None
        if self._transport is not None:
            self._transport.channel.Revoke()
            self._transport = None

    def close(self) -> None:
        """Releases the duplicate; arrays in the node's memory stay.  Collective."""
        self.devices.close()
        if self._slots is not None:
            self._slots.node.close()
            if self._slots.node.comm != self.channel:
                self._slots.node.comm.Free()
            self._slots = None
        if self.node is not None:
            self.node.close()
            self.node = None
        if self._transport is not None:
            self._transport.channel.Free()
            self._transport = None
