"""A server between two meetings: it serves one message after the other."""

from collections import Counter
from collections.abc import Sequence
from time import perf_counter

from mpitrain.server.account import RankReport
from mpitrain.server.corrections import correction
from mpitrain.server.messages import Clients, MessageKind
from mpitrain.server.roles import Members
from mpitrain.server.service_log import Pull, Push, ServiceLog
from mpitrain.server.service_order import RoundRobin
from mpitrain.server.shard import Shard
from mpitrain.server.work import begin
from mpitrain.training.loop import Batch
from mpitrain.training.parts import Parts


class Serving:
    """A rank that serves its shard of the parameters to workers."""

    def __init__(self, parts: Parts, members: Members, order: RoundRobin, log: ServiceLog) -> None:
        """Bind the messages; the log is closed with the parts."""
        parts.opened.callback(log.close)
        updater, piece, own = parts.updater, parts.store.pieces[0], parts.config.server
        self._parts, self._order, self._log = parts, order, log
        self._workers = leaders = members.roles.leaders()
        self._shard = Shard(
            piece,
            updater.state[0],
            lambda rate, step: updater.step(rate, number=step),
            parts.rates.common,
            len(leaders),
            own.limit,
            correction(own, len(leaders)),
        )
        self._clients = Clients(parts, members)
        parts.opened.callback(self._clients.free)
        self._stop_at = 0

    def begin(self, first: int, count: int) -> None:
        """Find the order of service of the next steps.

        Raises:
            LogError: the own log cannot be written.
        """
        self._log.begin(first)
        self._order.begin()

    def act(self, batch: Batch, first: int) -> RankReport:
        """Serve until all workers have taken all batches, or have failed.

        Raises:
            LogError: the own log cannot be written.
        """
        stop = first + len(batch.indices)
        events, failed, idle = self._serve_all(first, stop)
        if not failed:
            self._log.add(first, stop, events)
        sent, self._clients.sent = self._clients.sent, Counter()
        pushes = [event for event in events if isinstance(event, Push)]
        return RankReport(pushing=idle, sent=sent, pushes=pushes, squares=self._shard.squares)

    def _serve_all(self, first: int, stop: int) -> tuple[list[Pull | Push], bool, float]:
        """Serve the batches ``first <= i < stop``.

        Returns:
            The served pulls and pushes, in order; whether a worker has failed; seconds of waiting
            for messages.
        """
        shard, clients = self._shard, self._clients
        shard.meet(first)
        self._stop_at = stop
        running, ready = set(range(len(self._workers))), set[int]()
        for worker in running:
            clients.listen(worker)
        begin(self._parts, first)
        events: list[Pull | Push] = []
        failed, wait, idle = False, True, 0.0
        while running:
            start = perf_counter()
            for worker in self._arrived(running - ready, wait=wait):
                kind, _, _ = clients.inbox[worker].header()
                failed = failed or kind is MessageKind.FAILED
                has_ended = kind in (MessageKind.DONE, MessageKind.FAILED)
                (running.remove if has_ended else ready.add)(worker)
            idle += perf_counter() - start if wait else 0.0
            if failed:
                self._refuse(ready)
                wait = True
                continue
            chosen = self._order.next({w for w in ready if self._may_be_served(w)})
            wait = chosen is None
            if chosen is not None:
                ready.remove(chosen)
                events.append(self._serve(chosen))
        return events, failed, idle

    def _arrived(self, silent: set[int], *, wait: bool) -> Sequence[int]:
        if not wait:
            return self._clients.arrived(wait=False)
        who = ", ".join(str(self._workers[worker]) for worker in sorted(silent))
        with self._parts.comm.waiting(f"a message of worker rank {who}", by_all=False):
            return self._clients.arrived(wait=True)

    def _may_be_served(self, worker: int) -> bool:
        kind, _, _ = self._clients.inbox[worker].header()
        return kind is MessageKind.PUSH or self._shard.may_pull(worker)

    def _serve(self, worker: int) -> Pull | Push:
        shard, clients = self._shard, self._clients
        step, (kind, clock, clocks) = shard.step, clients.inbox[worker].header()
        out = clients.sending(worker)
        done: Pull | Push
        if kind is MessageKind.PULL:
            done = shard.pull(worker, clock, out)
            clients.answer(worker, MessageKind.PARAMETERS, clock)
        else:
            done = shard.push(worker, clock, clocks, clients.pushed(worker), out)
        clients.listen(worker)
        if step < shard.step < self._stop_at:
            begin(self._parts, shard.step)
        return done

    def _refuse(self, ready: set[int]) -> None:
        """Tell those who want parameters to stop; what the others push is not applied."""
        for worker in ready:
            kind, clock, _ = self._clients.inbox[worker].header()
            if kind is MessageKind.PULL:
                self._clients.sending(worker)
                self._clients.answer(worker, MessageKind.STOP, clock)
            self._clients.listen(worker)
        ready.clear()
