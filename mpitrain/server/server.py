"""A server between two meetings: it serves one message after the other."""

from collections import Counter
from collections.abc import Sequence
from time import perf_counter

from mpitrain.server.account import RankReport
from mpitrain.server.messages import Clients, MessageKind
from mpitrain.server.roles import Members
from mpitrain.server.shard import Push, Shard
from mpitrain.server.worker import begin
from mpitrain.training.loop import Batch
from mpitrain.training.parts import Parts


class Serving:
    """A rank that serves its shard of the parameters to workers."""

    def __init__(self, parts: Parts, members: Members) -> None:
        """Bind the messages."""
        updater, piece, own = parts.updater, parts.store.pieces[0], parts.config.server
        self._parts = parts
        self._workers = leaders = members.roles.leaders()
        self._shard = Shard(
            piece,
            updater.state[0],
            lambda rate, step: updater.step(rate, step_index=step),
            parts.rates.common,
            len(leaders),
            own.limit,
            own.needed(len(leaders)),
            own.correct == "predict",
        )
        self._clients = Clients(parts, members)
        parts.opened.callback(self._clients.free)
        self._stop_at = 0

    def act(self, batch: Batch, first: int) -> RankReport:
        """Serve until all workers have taken all batches, or have failed."""
        pushes, idle = self._serve_all(first, first + len(batch.indices))
        sent, self._clients.sent = self._clients.sent, Counter()
        return RankReport(pushing=idle, sent=sent, pushes=pushes, squares=self._shard.squares)

    def _serve_all(self, first: int, stop: int) -> tuple[list[Push], float]:
        """Serve the batches ``first <= i < stop``; gives the pushes, and seconds of waiting.

        Each worker in turn: one that was served comes last.  MPI promises no fairness of receives
        from any source, and might never hear one.
        """
        shard, clients = self._shard, self._clients
        shard.meet(first)
        self._stop_at = stop
        running, ready, last = set(range(len(self._workers))), set[int](), -1
        for worker in running:
            clients.listen(worker)
        begin(self._parts, first)
        pushes: list[Push] = []
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
            due = [worker for worker in ready if self._may_be_served(worker)]
            wait = not due
            if due:
                last = min(due, key=lambda worker: (worker <= last, worker))
                ready.remove(last)
                pushes += self._serve(last)
        return pushes, idle

    def _arrived(self, silent: set[int], *, wait: bool) -> Sequence[int]:
        if not wait:
            return self._clients.arrived(wait=False)
        who = ", ".join(str(self._workers[worker]) for worker in sorted(silent))
        with self._parts.comm.waiting(f"a message of worker rank {who}", by_all=False):
            return self._clients.arrived(wait=True)

    def _may_be_served(self, worker: int) -> bool:
        kind, _, _ = self._clients.inbox[worker].header()
        return kind is MessageKind.PUSH or self._shard.may_pull(worker)

    def _serve(self, worker: int) -> list[Push]:
        """Answer a pull, or apply a push; gives one that counts."""
        shard, clients = self._shard, self._clients
        step, (kind, clock, clocks) = shard.step, clients.inbox[worker].header()
        pushed = None
        if kind is MessageKind.PULL:
            shard.pull(worker, clients.sending(worker))
            # A synchronous worker whose step is over takes up the one that is open.
            clock = max(clock, shard.step) if shard.limit == 0 else clock
            clients.answer(worker, MessageKind.PARAMETERS, clock)
        else:
            pushed = shard.push(worker, clock, clocks, clients.pushed(worker))
        clients.listen(worker)
        if step < shard.step < self._stop_at:
            begin(self._parts, shard.step)
        return [pushed] if pushed else []

    def _refuse(self, ready: set[int]) -> None:
        """Tell those who want parameters to stop; what the others push is not applied."""
        for worker in ready:
            kind, clock, _ = self._clients.inbox[worker].header()
            if kind is MessageKind.PULL:
                self._clients.sending(worker)
                self._clients.answer(worker, MessageKind.STOP, clock)
            self._clients.listen(worker)
        ready.clear()
