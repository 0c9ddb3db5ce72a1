"""What a server does between two meetings: it serves, one message after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from collectives import Communicator
from mpitrain.config import ConfigError
from mpitrain.server.messages import Clients, MessageKind
from mpitrain.server.service_log import Pull, Push
from mpitrain.server.service_order import Turns
from mpitrain.server.shard import Shard


@dataclass(frozen=True)
class Service:
    """What was served.

    Attributes:
        events: in this order.
        failed: whether a worker has told that it failed.
        idle: seconds of waiting for messages.
    """

    events: Sequence[Pull | Push]
    failed: bool
    idle: float

    @property
    def pushes(self) -> list[Push]:
        """Of the events."""
        return [event for event in self.events if isinstance(event, Push)]


class Serving:
    """Serves a shard to workers."""

    def __init__(
        self,
        comm: Communicator,
        clients: Clients,
        shard: Shard,
        workers: Sequence[int],
        on_step: Callable[[int], None],
    ) -> None:
        """Nothing is served yet.

        Args:
            comm: of all ranks, whose watchdog looks on.
            clients: the messages.
            shard: what is served.
            workers: ranks of those who talk to servers.
            on_step: called as a step begins, counted from 0.
        """
        self._comm = comm
        self._clients = clients
        self._shard = shard
        self._workers = workers
        self._on_step = on_step
        self._stop_at = 0

    def until_done(self, first: int, stop: int, turns: Turns) -> Service:
        """Serve until all workers have taken the batches ``first <= i < stop``, or have failed.

        Raises:
            ConfigError: what came is not what ``turns`` expects; the workers have stopped.
        """
        shard, clients = self._shard, self._clients
        shard.meet(first)
        self._stop_at = stop
        running, ready = set(range(len(self._workers))), set[int]()
        for worker in running:
            clients.listen(worker)
        self._on_step(first)
        events: list[Pull | Push] = []
        error: ConfigError | None = None
        failed, wait, idle = False, True, 0.0
        while running:
            start = perf_counter()
            for worker in self._arrived(running - ready, wait=wait):
                kind = clients.inbox[worker].kind
                failed = failed or kind is MessageKind.FAILED
                (running.remove if kind in (MessageKind.DONE, MessageKind.FAILED) else ready.add)(
                    worker
                )
            idle += perf_counter() - start if wait else 0.0
            if failed or error:
                self._refuse(ready)
                wait = True
                continue
            try:
                chosen = turns.next({w for w in ready if self._may_be_served(w)})
                wait = chosen is None
                if chosen is not None:
                    ready.remove(chosen)
                    events.append(self._serve(chosen))
                    turns.served(events[-1])
                elif running and running == ready:
                    raise ConfigError(
                        "server.replay: no worker sends what the log has next; replay it with the "
                        "job and the package that wrote it"
                    )
            except ConfigError as mismatch:
                error = mismatch
        if error:
            raise error
        return Service(events, failed, idle)

    def _arrived(self, silent: set[int], *, wait: bool) -> Sequence[int]:
        if not wait:
            return self._clients.arrived(wait=False)
        who = ", ".join(str(self._workers[worker]) for worker in sorted(silent))
        with self._comm.waiting(f"a message of worker rank {who}", by_all=False):
            return self._clients.arrived(wait=True)

    def _may_be_served(self, worker: int) -> bool:
        return self._clients.inbox[worker].kind is MessageKind.PUSH or self._shard.may_pull(worker)

    def _serve(self, worker: int) -> Pull | Push:
        shard, clients = self._shard, self._clients
        message, step = clients.inbox[worker], shard.step
        done: Pull | Push
        if message.kind is MessageKind.PULL:
            done = shard.pull(worker, message.clock, clients.sending(worker))
            clients.answer(worker, MessageKind.PARAMETERS, message.clock)
        else:
            pulled = clients.sending(worker)
            done = shard.push(worker, message.clock, message.clocks, clients.pushed(worker), pulled)
        clients.listen(worker)
        if step < shard.step < self._stop_at:
            self._on_step(shard.step)
        return done

    def _refuse(self, ready: set[int]) -> None:
        """Tell those who want parameters to stop; what the others push is not applied."""
        for worker in ready:
            message = self._clients.inbox[worker]
            if message.kind is MessageKind.PULL:
                self._clients.sending(worker)
                self._clients.answer(worker, MessageKind.STOP, message.clock)
            self._clients.listen(worker)
        ready.clear()
