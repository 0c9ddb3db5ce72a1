"""A job with servers: who holds what, and the steps from one meeting of all ranks to the next."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import cast

import numpy as np
from mpi4py import MPI
from msgspec import structs

from collectives.codec import Codec, Dice
from mpitrain.arrays import Array
from mpitrain.compress import parse
from mpitrain.config import Compress, ConfigError, expect
from mpitrain.data import DataError
from mpitrain.group import share
from mpitrain.metrics import Skipped, Step, Straggler
from mpitrain.optim.groups import Grouping
from mpitrain.parallel.arena import DATA
from mpitrain.parallel.data_parallel import WholeGradients
from mpitrain.parallel.grid import Layout, use_once
from mpitrain.parallel.store import Store
from mpitrain.pipeline.runtime import reads
from mpitrain.pipeline.stage import Latest
from mpitrain.ranks.together import together
from mpitrain.server.account import RankReport, next_meeting, steps
from mpitrain.server.corrections import correction, with_decay_in_parts
from mpitrain.server.messages import Clients, Servers, check_size
from mpitrain.server.roles import Roles, roles
from mpitrain.server.serve import Serving
from mpitrain.server.service_log import Begun, LogError, decisive
from mpitrain.server.service_order import ServiceOrder, Turns, check_folders
from mpitrain.server.shard import Shard
from mpitrain.server.store import ServerStore, Spread, WorkerStore
from mpitrain.server.work import Exchange, Worker
from mpitrain.step.agreement import NonFinite
from mpitrain.training import build
from mpitrain.training.feed import Held
from mpitrain.training.trainer import Trainer


class ServedTrainer(Trainer):
    """Trains on workers that pull parameters from servers, and push gradients.

    The workers' parts of a batch are those that as many replicas would have: a worker's batch is
    its micro-batches of the global one, so that workers share the samples of an epoch without
    overlap, in the order that the seed draws.  What a worker pushes is its part of the batch's
    *mean*: the pushes of a clock add up to the gradient of synchronous training.

    All ranks, the servers too, take part in tests.

    Attributes:
        roles: who is what.
    """

    serves = True
    shared_errors = (*Trainer.shared_errors, LogError)

    def _open_grid(self) -> None:
        self.roles = self._roles()
        if not self.config.server.synchronous:
            self.updates_per_step = self.roles.groups
        super()._open_grid()
        rank, every = self.comm.rank, self.roles
        self._is_server = every.is_server(rank)
        #: Of a server, its number.
        self._number = rank - every.workers
        color = every.groups + self._number if self._is_server else every.group(rank)
        self._group = self.comm.Split(color, rank)
        self._alike = self.comm.Split(self._is_server, rank)
        for comm in (self._group, self._alike):
            use_once(comm)
        self._wire = MPI.Intracomm(self.comm).Dup()
        for one in (self._group, self._alike, self._wire):
            self._opened.callback(one.Free)

    def _roles(self) -> Roles:
        return roles(self.config.server, self.comm.size)

    def _hold(self, flat: Array) -> Store:
        check_size(flat.size, self.roles.servers, flat.dtype)
        spread = Spread(self.comm, self.roles, flat)
        # Inside of a group gradients are summed as they are; codes are of its pushes.
        summed = structs.replace(self.config, compress=Compress())
        reduction = build.reduction(summed, {DATA: self._group}, 0)
        self.summation = reduction.summation
        store: Store
        if self._is_server:
            store = ServerStore(self.arena, spread, reduction, self._number)
        else:
            store = WorkerStore(self.arena, spread, reduction)
        bound = self.config.server.limit
        store.algorithm = "parameter servers"
        store.reason = "no bound" if bound is None else f"bound {bound}"
        return store

    def _grouped(self) -> Grouping:
        own = self.config.server
        part = 1.0 if own.synchronous else own.push / self.roles.groups
        return with_decay_in_parts(super()._grouped(), part)

    def _bind_pipeline(self) -> None:
        super()._bind_pipeline()
        if self.state:
            expect(self.config, "batch-norm")
        layout = Layout((self.roles.workers,))
        self._worker_passes = self.passes.among(self._alike, layout)
        pipeline, report = self._worker_passes.schedule()
        places = [layout.place(rank) for rank in range(self.roles.workers)]
        self._worker_reads = [reads(pipeline, report, place) for place in places]
        self._order = together(self.comm, self._ordered, ConfigError)
        if self._order:
            self._opened.callback(self._order.close)
        if self._is_server:
            self._bind_server()
            return
        self._worker_passes.runner()
        self._worker_feed = self.feed.among(self._group)
        self._bind_worker()

    def _ordered(self) -> ServiceOrder | None:
        """In which this server serves."""
        folder, replay = Path(self.config.run.dir), self.config.server.replay
        check_folders(replay, folder)
        if not self._is_server:
            return None
        job = decisive(self.config, self.data_digest)
        own, every = self._number, self.roles
        return ServiceOrder(folder, replay, Begun(1, own, every.servers, every.groups, 0, job))

    def _bind_server(self) -> None:
        piece, state = self.store.pieces[0], self.updater.state[0]
        leaders, own = self.roles.leaders(), self.config.server
        shard = Shard(
            piece,
            state,
            lambda rate, step: self.updater.step(rate, number=step),
            self.rates.common,
            len(leaders),
            own.limit,
            correction(own, len(leaders)),
        )
        size, dtype = piece.parameters.size, piece.parameters.dtype
        codec = self._push_codec()
        self._clients = Clients(self._wire, leaders, size, dtype, self._traffic, codec)
        self._opened.callback(self._clients.free)
        self._serving = Serving(self.comm, self._clients, shard, leaders, self._begins)
        self._shard = shard

    def _bind_worker(self) -> None:
        self._to_servers = self._link()
        if self._to_servers:
            self._opened.callback(self._to_servers.free)
        store = cast(WholeGradients, self.store)
        self._worker = Worker(
            self._group,
            self._to_servers,
            store,
            store.spread.flat if isinstance(store, WorkerStore) else np.empty(0),
            self.config.server,
            self._compute,
            lambda batch, held: self._worker_passes.source(held, [batch]).unfit(),
            self.passes.forget,
            self.rates.rate,
        )

    def _link(self) -> Exchange | None:
        """To the servers, on the first rank of a group."""
        if self._group.rank > 0:
            return None
        ranks = [self.roles.server(number) for number in range(self.roles.servers)]
        spread = cast(WorkerStore, self.store).spread
        return Servers(
            self.comm,
            self._wire,
            ranks,
            spread.parts,
            spread.flat,
            self._traffic,
            self._push_codec(),
            Dice(self.config.run.seed, self.roles.group(self.comm.rank)),
        )

    def _push_codec(self) -> Codec | None:
        """By which gradients are pushed; None: as they are."""
        text = self.config.compress.codec
        return None if text == "none" else cast(Codec, parse(text))

    @property
    def layout(self) -> str:
        return str(self.roles)

    def run_epoch(self, epoch: int) -> Iterator[Step | Skipped]:
        """The steps of a pass that are not done yet, told when all ranks have met after them.

        Raises:
            DataError: on all ranks; one of them cannot read a sample.
            NonFinite: on all ranks; nothing that is not finite was pushed.
            ConfigError: on all ranks; what is replayed is another training, a parameter has no part
                in the loss, or a layer is no function of its inputs.
            LogError: on all ranks; a server cannot write its log.
        """
        before = epoch * self.sampler.steps_per_epoch
        end = min(before + self.sampler.steps_per_epoch, self.total_steps)
        batches = list(self.sampler.batches(epoch))
        window, every = self.config.server.window, self.config.checkpoint.every
        while self.steps_done < end:
            first = self.steps_done
            stop = next_meeting(first, end, window, every)
            for record in self._between(epoch, batches[first - before : stop - before], first):
                self.steps_done = record.step
                yield record
            if self.stopping:
                return

    def step(self, epoch: int, batch: Array, held: Held | None = None) -> Step | Skipped:
        """There are none by themselves.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "server: the steps of a job with servers are taken from meeting to meeting; iterate "
            "over run_epoch(epoch)"
        )

    def _between(self, epoch: int, batches: list[Array], first: int) -> list[Step]:
        """Take batches from one meeting to the next; collective."""
        start, stop = perf_counter(), first + len(batches)
        turns = together(
            self.comm,
            lambda: self._order.turns(first, stop) if self._order else None,
            ConfigError,
            LogError,
        )
        act: Callable[[], RankReport] = partial(self._work, epoch, batches, first)
        if turns:
            act = partial(self._serve, first, stop, turns)
        own = together(self.comm, act, DataError, NonFinite, ConfigError, LogError)
        own.seconds = perf_counter() - start
        reducing = own.idle if own.work is None else own.work.pushing
        pulling = {self.roles.server(0): own.work.pulling} if own.work else {}
        self.account.busy.add(own.seconds, reducing, pulling)
        with self.span("meet", "communicate"):
            self.refresh()
            own.moved = self.account.moved()
            told = self.comm.allgather(own)
            self._count_updates(len(batches))
            self.stopping = self.comm.allreduce(self.stop.raised(), op=MPI.LOR)
        self.steps_done = first
        self.purity.expect(f"until step {first}")
        sizes = [len(batch) for batch in batches]
        return steps(told, sizes, first, epoch, self.rates.rate, self._shares)

    @property
    def dense_bytes(self) -> float:
        """That a worker would send in synchronous training without servers, a step."""
        workers, itemsize = self.roles.workers, np.dtype(self.config.run.dtype).itemsize
        return 2 * (workers - 1) / workers * self.arena.size * itemsize

    def _count_updates(self, steps: int) -> None:
        """So many steps are done; collective."""
        self.updater.steps = self.comm.bcast(self.updater.steps, self.roles.server(0))

    def _shares(self, samples: int) -> list[int]:
        """Samples of each group in a batch of so many."""
        parts = self._worker_passes.parts

        def own(worker: int) -> int:
            found = [share(samples, m, parts) for m in self._worker_reads[worker]]
            return sum(part.stop - part.start for part in found)

        return [sum(map(own, self.roles.members(g))) for g in range(self.roles.groups)]

    def _serve(self, first: int, stop: int, turns: Turns) -> RankReport:
        service = self._serving.until_done(first, stop, turns)
        if self._order and not service.failed:
            self._order.write(first, stop, service.events)
        sent, self._clients.sent = self._clients.sent, Counter()
        return RankReport(
            idle=service.idle, sent=sent, pushes=service.pushes, squares=self._shard.squares
        )

    def _work(self, epoch: int, batches: list[Array], first: int) -> RankReport:
        own, feed = self._worker_reads[self.comm.rank], self._worker_feed
        reading = feed.batches(
            "train", epoch, batches, 1, self._worker_passes.parts, lambda steps: own
        )
        told = RankReport(leads=self._to_servers is not None)

        def timed() -> Iterator[tuple[list[Array], Held]]:
            for some in reading:
                told.reading += feed.read_seconds
                yield some

        with closing(reading):
            told.work = self._worker.until(first, first + len(batches), timed())
        if self._to_servers:
            told.sent, self._to_servers.sent = self._to_servers.sent, Counter()
        return told

    # Overflow ends in a loss that is not finite, which ends the run.
    @np.errstate(over="ignore", invalid="ignore")
    def _compute(self, clock: int, batch: Array, held: Held) -> tuple[float, str]:
        """The own part of a batch, forward and backward; the group's gradient is in the store.

        Returns:
            The own part of the mean loss, and the name of a parameter without a part in it, if any.
        """
        self._begins(clock)
        self.store.reset()
        passes = self._worker_passes
        source = passes.source(held, [batch])

        def update(number: int, loss: float) -> float:
            with self.span("reduce", "communicate"):
                self.store.wait()
            return loss

        (loss,) = passes.runner().run(
            source,
            Latest(passes.weights),
            self.store,
            update,
            lambda micro_batch: passes.context(clock, source.indices(micro_batch)),
        )
        names = (tensor.name for tensor in self.arena.tensors)
        return loss, next((name for name in names if name not in self.store.used), "")

    def _begins(self, step: int) -> None:
        self.steps_done = step
        if self._before_step:
            self._before_step(self)

    def straggler(self) -> Straggler | None:
        """A worker, or a server, that is much slower than the others."""
        return self.account.straggler(self._is_server, self.steps_done)
