"""A rank's actions carried out: computation, and the messages that follow from it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, TypeVar

from collectives import Communicator
from mpitrain.arrays import Array, Gradients, Scalar
from mpitrain.device import HOST, Device
from mpitrain.nn.context import RESTING, Context
from mpitrain.parallel.grid import Coordinates, Layout
from mpitrain.parallel.store import Sink, Weights
from mpitrain.pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Pipeline,
    Update,
)
from mpitrain.pipeline.messages import Expected, Mailbox, Spec
from mpitrain.pipeline.replay import Report
from mpitrain.pipeline.stage import Stage


class Source(Protocol):
    """The micro-batches of a run, by number."""

    def samples(self, micro_batch: int) -> int:
        """How many it has."""

    def inputs(self, micro_batch: int) -> Array:
        """What the first stage reads."""

    def loss(self, micro_batch: int, outputs: Array) -> tuple[Scalar, Array]:
        """The loss of the last stage's outputs, and its gradient by them."""


class WeightsInTime(Protocol):
    """Which weights a micro-batch sees, in schedules that update as they go."""

    def forward(self, micro_batch: int) -> Weights: ...
    def backward(self, micro_batch: int) -> Weights: ...
    def done(self, micro_batch: int) -> None: ...


@dataclass(frozen=True)
class Latest:
    """The same weights for all, as in synchronous training."""

    weights: Weights

    def forward(self, micro_batch: int) -> Weights:
        """For the forward pass."""
        return self.weights

    def backward(self, micro_batch: int) -> Weights:
        """For the backward pass."""
        return self.weights

    def done(self, micro_batch: int) -> None:
        """Its backward pass is over."""


#: What an update returns.
Updated = TypeVar("Updated")
#: ``span(name, category, **arguments)``, as ``mpitrain.metrics.trace.Trace.span``.
Span = Callable[..., AbstractContextManager[Any]]


def no_span(name: str, category: str, **arguments: Any) -> AbstractContextManager[Any]:
    """Records nothing."""
    return nullcontext()


class Runner:
    """Carries out the actions of one rank, again and again.

    Attributes:
        pipeline, report: as given.
        waited: seconds spent waiting for each other rank's activations in the last run, by rank.
        specs: of what goes into each virtual stage.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: Layout,
        pipeline: Pipeline,
        report: Report,
        chunks: Sequence[Stage],
        probe: Weights,
        inputs: Spec,
        *,
        span: Span = no_span,
        device: Device = HOST,
    ) -> None:
        """Agree on the shapes of messages; collective over ``comm``.

        Args:
            comm: all ranks of the layout.
            layout: which rank is where.
            pipeline: what the actions are for.
            report: of the replay of its schedule.
            chunks: our parts of the model.
            probe: weights for one forward pass of a sample of zeros, which shows the shapes.
            inputs: of one sample of the data.
            span: records what is done when.
            device: where arrays are.
        """
        self.comm = comm
        self.layout = layout
        self.place = layout.place(comm.rank)
        self.pipeline = pipeline
        self.report = report
        self.actions = report.actions[self.place[:2]]
        self.chunks = chunks
        self._span = span
        self._device = device
        self.waited: dict[int, float] = {}
        self.specs = self._agree(probe, inputs)
        self._last = _last_before_updates(self.actions)

    def run(
        self,
        source: Source,
        weights: WeightsInTime,
        sink: Sink,
        update: Callable[[int, Scalar], Updated],
        context: Callable[[int], Context] = lambda micro_batch: RESTING,
    ) -> list[Updated]:
        """Take all micro-batches of ``source`` forward and backward.

        Args:
            source: the micro-batches.
            weights: what each of them sees.
            sink: takes the gradients.
            update: called at each Update with its number and the own part of the loss since the
                one before.
            context: of a micro-batch.

        Returns:
            What ``update`` has returned, each time.
        """
        expected = [
            Expected(rank, tag, source.samples(micro_batch), spec, is_gradient=not tag & 1)
            for micro_batch, rank, tag, spec in self._arrivals()
        ]
        mailbox = Mailbox(self.comm, expected, self._device)
        saved: dict[tuple[int, int], tuple[Any, Array | None]] = {}
        kept: dict[tuple[int, int], Any] = {}
        updates: list[Updated] = []
        loss: Scalar = 0.0
        self.waited = {}
        for index, action in enumerate(self.actions):
            if isinstance(action, Update):
                mailbox.flush(sink.progress)
                updates.append(update(action.number, loss))
                loss = 0.0
                continue
            m, chunk = action.micro_batch, action.chunk
            stage, key = self.chunks[chunk], (m, chunk)
            virtual = chunk * self.pipeline.stages + self.place.stage

            def emit(layer: int, gradients: Gradients, final: bool = index in self._last) -> None:
                sink.accumulate(layer, gradients)
                if final:
                    sink.ready(layer)
                sink.progress()

            match action:
                case Forward():
                    x = self._take(mailbox, source, virtual, m)
                    with self._compute(action):
                        y, memory = stage.forward(weights.forward(m), x, context(m))
                        if virtual + 1 == self.pipeline.virtual_stages:
                            part, y = source.loss(m, y)
                            loss = loss + part
                    # The last stage keeps the gradient of the loss; others send an activation.
                    last = virtual + 1 == self.pipeline.virtual_stages
                    saved[key] = memory, y if last else None
                    if not last:
                        self._send(mailbox, y, virtual + 1, m, activation=True)
                case Backward() | BackwardInput():
                    memory, kept_dy = saved.pop(key)
                    dy = self._receive(mailbox, action) if kept_dy is None else kept_dy
                    whole = isinstance(action, Backward)
                    with self._compute(action):
                        dx, rest = stage.backward(
                            weights.backward(m), memory, dy, emit if whole else None
                        )
                    if virtual > 0:
                        self._send(mailbox, dx, virtual - 1, m, activation=False)
                    if whole:
                        weights.done(m)
                    else:
                        kept[key] = rest
                case BackwardWeight():
                    with self._compute(action):
                        stage.gradients(weights.backward(m), kept.pop(key), emit)
                    weights.done(m)
        with self._span("sends", "wait"):
            mailbox.finish()
        return updates

    def infer(
        self,
        source: Source,
        micro_batches: int,
        weights: Weights,
        judge: Callable[[int, Array], None],
        context: Context = RESTING,
    ) -> None:
        """Forward alone, each micro-batch in turn; the last stage gives outputs to ``judge``."""
        pipeline, stage = self.pipeline, self.place.stage
        virtual_stages = [c * pipeline.stages + stage for c in range(pipeline.chunks)]
        own = range(self.place.replica, micro_batches, pipeline.replicas[stage])
        expected = [
            Expected(self._rank(v - 1, m), _tag(v, True), source.samples(m), self.specs[v])
            for m in own
            for v in virtual_stages
            if v > 0
        ]
        mailbox = Mailbox(self.comm, expected, self._device)
        for m in own:
            for chunk, v in enumerate(virtual_stages):
                x = source.inputs(m) if v == 0 else mailbox.receive()
                y, _ = self.chunks[chunk].forward(weights, x, context)
                if v + 1 == pipeline.virtual_stages:
                    judge(m, y)
                else:
                    self._send(mailbox, y, v + 1, m, activation=True)
        mailbox.finish()

    def _take(self, mailbox: Mailbox, source: Source, virtual: int, micro_batch: int) -> Array:
        if virtual == 0:
            return source.inputs(micro_batch)
        return self._receive(mailbox, Forward(micro_batch))

    def _receive(self, mailbox: Mailbox, action: Compute) -> Array:
        source, start = mailbox.next_source, perf_counter()
        name = f"receive for {action.letter}{action.micro_batch}"
        with self._span(name, "wait", source=source):
            found = mailbox.receive()
        self.waited[source] = self.waited.get(source, 0.0) + perf_counter() - start
        return found

    def _send(
        self, mailbox: Mailbox, array: Array, virtual: int, micro_batch: int, *, activation: bool
    ) -> None:
        with self._span(f"send {micro_batch}", "communicate"):
            target, tag = self._rank(virtual, micro_batch), _tag(virtual, activation)
            mailbox.send(array, target, tag, is_gradient=not activation)

    def _compute(self, action: Compute) -> AbstractContextManager[Any]:
        name = f"{action.letter}{action.micro_batch}"
        return self._span(name, "compute", micro_batch=action.micro_batch, chunk=action.chunk)

    def _rank(self, virtual: int, micro_batch: int) -> int:
        """Who has a micro-batch in a virtual stage, among those with our part of the layers."""
        stage = virtual % self.pipeline.stages
        replica = self.pipeline.replica(stage, micro_batch)
        return self.layout.rank(Coordinates(stage, replica, self.place.tensor))

    def _arrivals(self) -> list[tuple[int, int, int, Spec]]:
        """(micro-batch, rank, tag, spec) of the messages that our actions need, in order."""
        arrivals = []
        for action in self.actions:
            if isinstance(action, (Update, BackwardWeight)):
                continue
            virtual = action.chunk * self.pipeline.stages + self.place.stage
            m, forward = action.micro_batch, isinstance(action, Forward)
            other = virtual - 1 if forward else virtual + 1
            if 0 <= other < self.pipeline.virtual_stages:
                spec = self.specs[virtual if forward else other]
                arrivals.append((m, self._rank(other, m), _tag(virtual, forward), spec))
        return arrivals

    def _agree(self, probe: Weights, inputs: Spec) -> list[Spec]:
        specs = [inputs]
        for virtual in range(self.pipeline.virtual_stages - 1):
            chunk, stage = divmod(virtual, self.pipeline.stages)
            found = None
            if stage == self.place.stage:
                sample = self._device.xp.zeros((1, *specs[-1].shape), specs[-1].dtype)
                y, _ = self.chunks[chunk].forward(probe, sample)
                found = Spec(y.shape[1:], y.dtype)
            specs.append(self.comm.bcast(found, self.layout.rank(Coordinates(stage, 0, 0))))
        return specs


def reads(pipeline: Pipeline, report: Report, place: Coordinates) -> list[int]:
    """The micro-batches of a run that a rank takes through the first or the last stage, in turn."""
    ends = (0, pipeline.virtual_stages - 1)
    found = [
        action.micro_batch
        for action in report.actions[place[:2]]
        if isinstance(action, Forward) and action.chunk * pipeline.stages + place.stage in ends
    ]
    return list(dict.fromkeys(found))


def _tag(virtual: int, activation: bool) -> int:
    """Of messages to a virtual stage; the replay has proved that their order is enough."""
    return 2 * virtual + activation


def _last_before_updates(actions: Sequence[Action]) -> frozenset[int]:
    """Which actions give the last gradients of their chunk before an Update."""
    last: set[int] = set()
    seen: set[int] = set()
    for index in reversed(range(len(actions))):
        action = actions[index]
        if isinstance(action, Update):
            seen.clear()
        elif isinstance(action, (Backward, BackwardWeight)) and action.chunk not in seen:
            seen.add(action.chunk)
            last.add(index)
    return frozenset(last)
