"""Jobs with servers, or with one copy for all ranks: steps from one meeting to the next."""

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
from mpi4py import MPI
from msgspec import structs

from collectives import Communicator
from collectives.codec import Codec, Dice
from mpitrain.arrays import Array
from mpitrain.compress import parse
from mpitrain.config import Compress, Config, ConfigError
from mpitrain.data import DataError
from mpitrain.group import TensorGroup, share
from mpitrain.metrics import Step
from mpitrain.optim.groups import Grouping
from mpitrain.parallel.arena import DATA
from mpitrain.parallel.grid import Layout, use_once
from mpitrain.parallel.store import Store
from mpitrain.parallel.whole import WholeGradients
from mpitrain.pipeline.runtime import reads
from mpitrain.ranks.together import together
from mpitrain.server.account import Told, steps
from mpitrain.server.corrections import correction
from mpitrain.server.decay import in_parts
from mpitrain.server.hogwild import NodeCopy, Tables, Unlocked
from mpitrain.server.log import Begun, LogError, decisive
from mpitrain.server.meetings import next_meeting
from mpitrain.server.order import Order, check_folders
from mpitrain.server.roles import Roles, roles
from mpitrain.server.serve import Serving
from mpitrain.server.shard import Shard
from mpitrain.server.store import Kept, Pulled, Spread
from mpitrain.server.turns import Turns
from mpitrain.server.wire import Clients, Servers, check_size
from mpitrain.server.work import Exchange, Worker
from mpitrain.step.agreement import NonFinite
from mpitrain.training import build
from mpitrain.training.assemble import Holding, Placement, Variant, assemble, closed_if_refused
from mpitrain.training.feed import Held
from mpitrain.training.loop import Batch, Loop, forward_backward
from mpitrain.training.parts import Parts
from mpitrain.training.passes import Passes


@dataclass(frozen=True)
class Members:
    """The ranks of a job with servers.

    Attributes:
        roles: role of each rank.
        is_server: whether this rank is a server.
        number: number of this server; negative on a worker.
        group: the workers that push together with this one; on a server, itself.
        alike: all workers, or all servers.
        wire: messages of workers and servers.
    """

    roles: Roles
    is_server: bool
    number: int
    group: Communicator
    alike: Communicator
    wire: MPI.Intracomm


class _Placing:
    """Places the parameters of a job with servers, or with one copy for all ranks.

    Attributes:
        members: the ranks, after :meth:`hold`.
    """

    members: Members

    def variant(self, config: Config) -> Variant:
        """What such a job makes in its own way."""
        if config.server.hogwild:  # each rank sees all tables
            return Variant(spread=lambda grid: TensorGroup(), hold=self.hold, group=self._group)
        return Variant(hold=self.hold, group=self._group)

    def hold(self, placed: Placement, flat: Array) -> Holding:
        """Make the communicators and the store; collective.

        Raises:
            ConfigError: on all ranks: they cannot be workers and servers as the job asks.
        """
        comm, own = placed.comm, placed.config.server
        every = Roles(comm.size, 0, comm.size) if own.hogwild else roles(own, comm.size)
        is_server, number = every.is_server(comm.rank), comm.rank - every.workers
        color = every.groups + number if is_server else every.group(comm.rank)
        group, alike = comm.Split(color, comm.rank), comm.Split(is_server, comm.rank)
        wire = MPI.Intracomm(comm).Dup()
        for one in (group, alike):
            use_once(one)
        for each in (group, alike, wire):
            placed.opened.callback(each.Free)
        self.members = Members(every, is_server, number, group, alike, wire)
        store = (_one_copy if own.hogwild else _with_servers)(placed, self.members, flat)
        return Holding(store, placed.config, layout=str(every))

    def _group(self, placed: Placement, grouping: Grouping) -> Grouping:
        own = placed.config.server
        part = 1.0 if own.synchronous else own.push / self.members.roles.groups
        return in_parts(grouping, part)


def _one_copy(placed: Placement, members: Members, flat: Array) -> Store:
    sums_rest = placed.config.server.hogwild == "tables"
    algorithm = placed.config.parallel.algorithm if sums_rest else None
    store = NodeCopy(placed.comm, placed.arena, flat, algorithm)
    summed = f", the rest summed by {store.algorithm}" if sums_rest else ""
    store.algorithm, store.reason = "Hogwild", f"one copy, without locks{summed}"
    return store


def _with_servers(placed: Placement, members: Members, flat: Array) -> Store:
    config, every = placed.config, members.roles
    check_size(flat.size, every.servers, flat.dtype)
    spread = Spread(placed.comm, every, flat)
    # Inside of a group gradients are summed as they are; codecs are for its pushes.
    summed = structs.replace(config, compress=Compress())
    reduction = build.reduction(summed, {DATA: members.group}, 0)
    store: Store
    if members.is_server:
        store = Kept(placed.arena, spread, reduction, members.number)
    else:
        store = Pulled(placed.arena, spread, reduction)
    bound = config.server.limit
    store.algorithm = "parameter servers"
    store.reason = "no bound" if bound is None else f"bound {bound}"
    return store


class ServedLoop(Loop):
    """Workers pull parameters from servers, and push gradients; all ranks meet now and then.

    The workers' parts of a batch are those that as many replicas would have: a worker's batch is
    its micro-batches of the global one, so that workers share the samples of an epoch without
    overlap, in the order that the seed draws.  A worker pushes its part of the batch's *mean*: the
    pushes of a clock add up to the gradient of synchronous training.

    With ``server.hogwild`` there are no servers: the workers update one copy of the parameters.

    All ranks, servers included, take part in tests.
    """

    @classmethod
    def start(cls, comm: MPI.Intracomm, config: Config, *given: Any, **hooks: Any) -> "ServedLoop":
        """Make the parts and the loop; arguments as of :func:`assemble`.  Collective."""
        placing = _Placing()
        parts = assemble(comm, config, *given, **hooks, variant=placing.variant(config))
        with closed_if_refused(parts.comm, parts.opened):
            return cls(parts, placing.members)

    def __init__(self, parts: Parts, members: Members) -> None:
        """Bind the messages of workers and servers; collective.

        Raises:
            ConfigError: on all ranks: the model keeps running means, or the log that is to be
                replayed cannot be.
        """
        super().__init__(parts)
        self._members, roles = members, members.roles
        if not parts.config.server.synchronous:
            parts.updates_per_step = roles.groups
        if parts.state:
            raise ConfigError(
                "server.ranks: batch norm's running means are neither pulled nor pushed; take a "
                "model without, as kind = 'resnet', or set server.ranks = 0"
            )
        layout = Layout((roles.workers,))
        passes = parts.passes.among(members.alike, layout)
        pipeline, report = passes.schedule()
        places = [layout.place(rank) for rank in range(roles.workers)]
        #: Micro-batches of each worker.
        self._reads = [reads(pipeline, report, place) for place in places]
        self._micro_batches = passes.parts
        order = together(parts.comm, lambda: _order(parts, members), ConfigError)
        self._side: _ServerSide | _WorkerSide
        if members.is_server:
            assert order is not None, "each server has one"
            self._side = _ServerSide(parts, members, order)
        else:
            self._side = _WorkerSide(parts, members, passes, self._reads[parts.comm.rank])

    def batches(self, epoch: int) -> Generator[Batch]:
        """The batches from each meeting to the next."""
        parts = self.parts
        before = epoch * parts.sampler.steps_per_epoch
        end = min(before + parts.sampler.steps_per_epoch, parts.total_steps)
        indices = list(parts.sampler.batches(epoch))
        window, every = parts.config.server.window, parts.config.checkpoint.every
        while parts.steps_done < end:
            first = parts.steps_done
            stop = next_meeting(first, end, window, every)
            yield Batch(epoch, indices[first - before : stop - before])

    def step(self, batch: Batch) -> list[Step]:
        """Take batches from one meeting to the next.

        Raises:
            NonFinite: on all ranks; nothing that is not finite was pushed.
            ConfigError: besides, on all ranks; what is replayed is another training, or a
                parameter has no part in the loss.
            LogError: on all ranks; a server cannot write its log.
        """
        parts, start = self.parts, perf_counter()
        parts.expect_open()
        first, count = parts.steps_done, len(batch.indices)
        together(parts.comm, lambda: self._side.begin(first, count), ConfigError, LogError)
        own = together(
            parts.comm, lambda: self._side.act(batch, first),
            DataError, NonFinite, ConfigError, LogError,
        )  # fmt: skip
        own.seconds = perf_counter() - start
        reducing = own.idle if own.work is None else own.work.pushing
        pulling = {self._members.roles.server(0): own.work.pulling} if own.work else {}
        parts.account.busy.add(own.seconds, reducing, pulling)
        with parts.span("meet", "communicate"):
            parts.refresh()
            own.moved = parts.account.moved()
            told = parts.comm.allgather(own)
            self._count_updates(count)
            parts.stopping = parts.comm.allreduce(parts.stop.raised(), op=MPI.LOR)
        parts.steps_done = first + count
        parts.purity.expect(f"until step {parts.steps_done}")
        sizes = [len(indices) for indices in batch.indices]
        return steps(told, sizes, first, batch.epoch, parts.rates.rate, self._shares)

    def _count_updates(self, steps: int) -> None:
        """Learn how many updates there were in ``steps`` steps; collective."""
        updater, roles = self.parts.updater, self._members.roles
        if roles.servers:
            updater.steps = self.parts.comm.bcast(updater.steps, roles.server(0))
        else:
            updater.steps += steps

    def _shares(self, samples: int) -> list[int]:
        """Samples of each group in a batch of ``samples``."""

        def own(worker: int) -> int:
            found = [share(samples, m, self._micro_batches) for m in self._reads[worker]]
            return sum(part.stop - part.start for part in found)

        roles = self._members.roles
        return [sum(map(own, roles.members(group))) for group in range(roles.groups)]


class _ServerSide:
    """A server from one meeting to the next."""

    def __init__(self, parts: Parts, members: Members, order: Order) -> None:
        """Bind the messages; ``order``: of service."""
        config, store, updater = parts.config, parts.store, parts.updater
        parts.opened.callback(order.close)
        leaders = members.roles.leaders()
        piece, own = store.pieces[0], config.server
        self._order = order
        self._shard = Shard(
            piece,
            updater.state[0],
            lambda rate, step: updater.step(rate, number=step),
            parts.rates.common,
            len(leaders),
            own.limit,
            correction(own, len(leaders)),
        )
        size, dtype, traffic = piece.parameters.size, piece.parameters.dtype, parts.comm.traffic
        assert traffic is not None, "it is counted from the beginning"
        self._clients = Clients(members.wire, leaders, size, dtype, traffic, _codec(config))
        parts.opened.callback(self._clients.free)
        begins = partial(_begin, parts)
        self._serving = Serving(parts.comm, self._clients, self._shard, leaders, begins)
        self._turns: Turns | None = None

    def begin(self, first: int, count: int) -> None:
        """Find the order of service of the next steps.

        Raises:
            ConfigError: the log that is replayed does not have them.
            LogError: the own log cannot be written.
        """
        self._turns = self._order.turns(first, first + count)

    def act(self, batch: Batch, first: int) -> Told:
        """Serve the workers until they have taken all batches."""
        assert self._turns is not None, "begin() comes first"
        stop = first + len(batch.indices)
        service = self._serving.until_done(first, stop, self._turns)
        if not service.failed:
            self._order.write(first, stop, service.events)
        sent, self._clients.sent = self._clients.sent, Counter()
        return Told(
            idle=service.idle, sent=sent, pushes=service.pushes, squares=self._shard.squares
        )


class _WorkerSide:
    """A worker from one meeting to the next."""

    def __init__(self, parts: Parts, members: Members, passes: Passes, own: Sequence[int]) -> None:
        """Bind the messages; ``passes``: of the workers; ``own``: this one's micro-batches."""
        self._parts, self._passes, self._own = parts, passes, own
        passes.runner()
        self._feed = parts.feed.among(members.group)
        self._link = _link(parts, members)
        if self._link:
            parts.opened.callback(self._link.free)
        store = cast(WholeGradients, parts.store)
        self._worker = Worker(
            members.group,
            self._link,
            store,
            store.spread.flat if isinstance(store, Pulled) else np.empty(0),
            parts.config.server,
            self._compute,
            lambda batch, held: passes.source(held, [batch]).unfit(),
            parts.passes.forget,
            parts.rates.rate,
        )

    def begin(self, first: int, count: int) -> None:
        """A worker has nothing to prepare."""

    def act(self, batch: Batch, first: int) -> Told:
        """Take all batches, in turn and at this worker's pace."""
        feed, link = self._feed, self._link
        reading = feed.batches(
            "train", batch.epoch, batch.indices, 1, self._passes.parts, lambda steps: self._own
        )
        told = Told(leads=link is not None)

        def timed() -> Iterator[tuple[list[Array], Held]]:
            for some in reading:
                told.reading += feed.read_seconds
                yield some

        with closing(reading):
            told.work = self._worker.until(first, first + len(batch.indices), timed())
        if link:
            told.sent, link.sent = link.sent, Counter()
        if isinstance(link, Tables):
            told.squares, link.squares = link.squares, {}
        return told

    # Overflow ends in a loss that is not finite, which ends the run.
    @np.errstate(over="ignore", invalid="ignore")
    def _compute(self, clock: int, batch: Array, held: Held) -> tuple[float, str]:
        """Take this worker's part of a batch forward and backward.

        Returns:
            Its part of the mean loss, and the name of a parameter without a part in it, if any.
        """
        parts, passes = self._parts, self._passes
        if not isinstance(self._link, Tables):  # which begins before all ranks meet
            _begin(parts, clock)
        parts.store.reset()
        source = passes.source(held, [batch])
        loss, _ = forward_backward(parts, passes, clock, source, by_all=False)
        names = (tensor.name for tensor in parts.arena.tensors)
        unused = next((name for name in names if name not in parts.store.used), "")
        return cast(float, loss), unused


def _begin(parts: Parts, step: int) -> None:
    """A step begins on this rank."""
    parts.steps_done = step
    parts.before_step(parts)


def _order(parts: Parts, members: Members) -> Order | None:
    """The order in which this server serves."""
    own, every = parts.config.server, members.roles
    if own.hogwild:
        return None
    folder = Path(parts.config.run.dir)
    check_folders(own.replay, folder)
    if not members.is_server:
        return None
    job = decisive(parts.config, parts.data_digest)
    begun = Begun(1, members.number, every.servers, every.groups, 0, job)
    return Order(folder, own.replay, begun)


def _link(parts: Parts, members: Members) -> Exchange | None:
    """A worker's messages to the servers, on the first rank of a group."""
    if isinstance(store := parts.store, NodeCopy):
        if parts.config.server.hogwild == "tables":
            return Tables(store, partial(_begin, parts))
        return Unlocked(store.flat)
    if members.group.rank > 0:
        return None
    roles, spread, traffic = members.roles, cast(Pulled, store).spread, parts.comm.traffic
    assert traffic is not None, "it is counted from the beginning"
    return Servers(
        parts.comm,
        members.wire,
        [roles.server(number) for number in range(roles.servers)],
        spread.parts,
        spread.flat,
        traffic,
        _codec(parts.config),
        Dice(parts.config.run.seed, roles.group(parts.comm.rank)),
    )


def _codec(config: Config) -> Codec | None:
    """The codec of pushed gradients; ``None``: they are pushed as they are."""
    text = config.compress.codec
    return None if text == "none" else cast(Codec, parse(text))
