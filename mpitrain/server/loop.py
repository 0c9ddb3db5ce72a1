"""Jobs with servers, or with one copy for all ranks: steps from one meeting to the next."""

from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import cast

from mpi4py import MPI
from msgspec import structs

from mpitrain.arrays import Array
from mpitrain.config import Compress, ConfigError, expect
from mpitrain.config.server import MOST_GROUPS
from mpitrain.data import DataError
from mpitrain.group import share
from mpitrain.metrics.records import Step
from mpitrain.optim.groups import Grouping, ParameterGroup
from mpitrain.optim.optimizers import Adam
from mpitrain.parallel.arena import DATA
from mpitrain.parallel.grid import Layout, use_once
from mpitrain.parallel.store import Store
from mpitrain.pipeline.runtime import reads
from mpitrain.ranks.together import together
from mpitrain.server.account import next_meeting, steps
from mpitrain.server.hogwild import NodeCopy
from mpitrain.server.messages import check_size
from mpitrain.server.roles import Members, Roles, roles
from mpitrain.server.server import Serving
from mpitrain.server.store import ServerStore, Spread, WorkerStore
from mpitrain.server.worker import Worker
from mpitrain.training import build
from mpitrain.training.loop import Batch, Loop, remaining
from mpitrain.training.parts import Parts
from mpitrain.update.agreement import NonFinite


def hold(parts: Parts, flat: Array) -> Store:
    """Make the communicators and the store of a job with servers, or with one copy; collective.

    Raises:
        ConfigError: on all ranks: they cannot be workers and servers as the job asks.
    """
    comm, own = parts.comm, parts.config.server
    every = Roles(comm.size, 0, comm.size) if own.hogwild else roles(own, comm.size)
    is_server, number = every.is_server(comm.rank), comm.rank - every.workers
    color = every.groups + number if is_server else every.group(comm.rank)
    group, alike = comm.Split(color, comm.rank), comm.Split(is_server, comm.rank)
    wire = MPI.Intracomm(comm).Dup()
    for one in (group, alike):
        use_once(one)
    for each in (group, alike, wire):
        parts.opened.callback(each.Free)
    members = Members(every, is_server, number, group, alike, wire)
    parts.layout = str(every)
    if own.hogwild:
        return NodeCopy(parts, flat, members)
    return _with_servers(parts, members, flat)


def _with_servers(parts: Parts, members: Members, flat: Array) -> Store:
    config, every = parts.config, members.roles
    check_size(flat.size, every.servers, flat.dtype)
    spread = Spread(parts.comm, every, flat)
    # Inside of a group gradients are summed as they are; codecs are for its pushes.
    summed = structs.replace(config, compress=Compress())
    reduction = build.reduction(summed, {DATA: members.group}, 0)
    store: Store
    if members.is_server:
        store = ServerStore(parts.arena, spread, reduction, members)
    else:
        store = WorkerStore(parts.arena, spread, reduction, members)
    bound = config.server.limit
    store.algorithm = "parameter servers"
    store.reason = "no bound" if bound is None else f"bound {bound}"
    if every.groups > MOST_GROUPS and bound != 0:
        store.reason += (
            f"; warning: {every.groups} groups push by themselves, and beyond {MOST_GROUPS} the "
            f"gradients are too old to learn well from; server.groups = {MOST_GROUPS} makes fewer"
        )
    return store


def members_of(parts: Parts) -> Members:
    """The ranks of a job, as :func:`hold` has made them."""
    return cast(NodeCopy | ServerStore | WorkerStore, parts.store).members


def decayed_in_parts(parts: Parts, usual: Grouping) -> Grouping:
    """Groups with a part of the weight decay in each push, so that a step has all of it.

    AdamW's decay stays: each push is a step of the whole rate there, and its decay a part of that
    step.
    """
    own, groups = parts.config.server, members_of(parts).roles.groups
    part = 1.0 if own.synchronous else own.push / groups
    known: dict[int, ParameterGroup] = {}

    def grouped(name: str) -> ParameterGroup:
        found = usual(name)
        optimizer = found.optimizer
        if isinstance(optimizer, Adam) and optimizer.decoupled:
            return found
        if id(found) not in known:
            decay = optimizer.weight_decay * part  # type: ignore[attr-defined]
            scaled = replace(optimizer, weight_decay=decay)  # type: ignore[type-var]
            known[id(found)] = replace(found, optimizer=scaled)
        return known[id(found)]  # one group for equal tensors, which are updated together

    return grouped


class ServedLoop(Loop):
    """Workers pull parameters from servers, and push gradients; all ranks meet now and then.

    The workers' parts of a batch are those that as many replicas would have: a worker's batch is
    its micro-batches of the global one, so that workers share the samples of an epoch without
    overlap, in the order that the seed draws.  A worker pushes its part of the batch's *mean*: the
    pushes of a clock add up to the gradient of synchronous training.

    With ``server.hogwild`` there are no servers: the workers update one copy of the parameters.

    All ranks, servers included, take part in tests.
    """

    def __init__(self, parts: Parts) -> None:
        """Bind the messages of workers and servers; collective.

        Raises:
            ConfigError: on all ranks: the model keeps running means.
        """
        super().__init__(parts)
        self._members = members = members_of(parts)
        roles = members.roles
        if not parts.config.server.synchronous:
            parts.updates_per_step = roles.groups
            # A step has a push of each group in every server.push clocks, and keeps as much.
            parts.updater.decay **= parts.config.server.push / roles.groups
        if parts.state or parts.model.mixes:
            expect(parts.config, "batch-norm")
        layout = Layout((roles.workers,))
        passes = parts.passes.among(members.alike, layout)
        pipeline, report = passes.schedule()
        places = [layout.place(rank) for rank in range(roles.workers)]
        #: Micro-batches of each worker.
        self._reads = [reads(pipeline, report, place) for place in places]
        self._micro_batches = passes.micro_batches
        self._side: Serving | Worker
        if members.is_server:
            self._side = Serving(parts, members)
        else:
            self._side = Worker(parts, members, passes, self._reads[parts.comm.rank])

    def batches(self, epoch: int) -> Generator[Batch]:
        """The batches from each meeting to the next."""
        parts = self.parts
        before, indices = parts.steps_done, list(remaining(parts, epoch))
        end = before + len(indices)
        window, every = parts.config.server.window, parts.config.checkpoint.every
        while parts.steps_done < end:
            first = parts.steps_done
            stop = next_meeting(first, end, window, every)
            yield Batch(epoch, indices[first - before : stop - before])

    def step(self, batch: Batch) -> list[Step]:
        """Take batches from one meeting to the next.

        Raises:
            NonFinite: on all ranks; nothing that is not finite was pushed.
            ConfigError: besides, on all ranks; a parameter has no part in the loss.
        """
        parts = self.parts
        parts.expect_open()
        first, count = parts.steps_done, len(batch.indices)
        act = partial(self._side.act, batch, first)
        own = together(parts.comm, act, DataError, NonFinite, ConfigError)
        own.seconds = parts.account.lap()
        is_worker = own.pushes is None
        roles = self._members.roles
        pulling = {roles.server(0): own.pulling} if is_worker and roles.servers else {}
        parts.account.add(own.seconds, own.pushing, pulling)
        with parts.span("meet", "communicate"):
            parts.refresh()
            own.moved, own.memory = parts.account.moved(), parts.device.memory()
            told = parts.comm.allgather(own)
            self._count_updates(count)
            parts.stopping = parts.comm.allreduce(parts.stop.raised(), op=MPI.LOR)
        parts.count_steps(first, batch.indices)
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
