"""Execution of a rank's actions: computation, and the messages that follow from it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, TypeVar

from collectives import Communicator
from mpitrain.arrays import Array, Gradients, Scalar
from mpitrain.device import HOST, Device
from mpitrain.nn.context import RESTING, Context, Terms
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
from mpitrain.pipeline.mailbox import Expected, Mailbox, Spec
from mpitrain.pipeline.replay import Report
from mpitrain.pipeline.stage import Emit, Source, Stage, WeightsInTime

#: Result of an update.
Updated = TypeVar("Updated")
#: ``span(name, category, **arguments)``: see ``mpitrain.metrics.trace.Trace.span``.
Span = Callable[..., AbstractContextManager[Any]]


def no_span(name: str, category: str, **arguments: Any) -> AbstractContextManager[Any]:
    """Records nothing."""
    return nullcontext()


class Runner:
    """Carries out the actions of one rank, again and again.

    Attributes:
        pipeline, report: the pipeline, and the report of its schedule.
        waited: seconds of waiting for other ranks' messages in the last run, by rank.
        specs: shape and type of the inputs of each virtual stage; sizes of some may vary.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: Layout,
        report: Report,
        chunks: Sequence[Stage],
        probe: Weights,
        inputs: Spec,
        *,
        span: Span = no_span,
        device: Device = HOST,
        varies: bool = False,
        resting: Context = RESTING,
    ) -> None:
        """Agree on the shapes of messages; collective over ``comm``.

        Args:
            comm: all ranks of the layout.
            layout: layout of the ranks.
            report: report of the replay of the schedule.
            chunks: our parts of the model.
            probe: weights for one forward pass of a sample of zeros, which shows the shapes.
            inputs: shape and type of one sample of the data.
            span: records times.
            device: device of the arrays.
            varies: whether samples of some micro-batches have other sizes than ``inputs``.
            resting: context of the pass with ``probe``.
        """
        self.comm = comm
        self.layout = layout
        self.place = layout.place(comm.rank)
        self.pipeline = report.pipeline
        self.report = report
        self.actions = report.actions[self.place[:2]]
        self.chunks = chunks
        self._span = span
        self._device = device
        self._varies = varies
        self.waited: dict[int, float] = {}
        self.specs = self._agree(probe, inputs, resting)
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
            weights: weights for each micro-batch.
            sink: receiver of the gradients.
            update: called at each Update with its number and the own part of the loss since the
                last one.
            context: context of a micro-batch.

        Returns:
            Results of ``update``.
        """
        expected = [
            Expected(rank, tag, source.samples(micro_batch), spec, is_gradient=not tag & 1)
            for micro_batch, rank, tag, spec in self._arrivals()
        ]
        mailbox = Mailbox(self.comm, expected, self._device, varies=self._varies)
        passes = _Passes(self, mailbox, source, weights)
        updates: list[Updated] = []
        self.waited = {}
        for index, action in enumerate(self.actions):

            def emit(layer: int, gradients: Gradients, final: bool = index in self._last) -> None:
                sink.accumulate(layer, gradients)
                if final:
                    sink.ready(layer)
                sink.progress()

            match action:
                case Update():
                    mailbox.flush(sink.progress)
                    updates.append(update(action.number, passes.loss))
                    passes.loss = 0.0
                case Forward():
                    passes.forward(action, context(action.micro_batch))
                case Backward() | BackwardInput():
                    passes.backward(action, emit if isinstance(action, Backward) else None)
                case BackwardWeight():
                    passes.gradients(action, emit)
        with self._span("sends", "wait"):
            mailbox.finish()
        return updates

    def infer(
        self,
        source: Source,
        micro_batches: int,
        weights: Weights,
        judge: Callable[[int, Array], None],
        context: Callable[[int], Context],
    ) -> None:
        """Take each micro-batch forward; the last stage gives outputs to ``judge``."""
        pipeline, stage = self.pipeline, self.place.stage
        virtual_stages = [c * pipeline.stages + stage for c in range(pipeline.chunks)]
        own = range(self.place.replica, micro_batches, pipeline.replicas[stage])
        expected = [
            Expected(self._rank(v - 1, m), _tag(v, True), source.samples(m), self.specs[v])
            for m in own
            for v in virtual_stages
            if v > 0
        ]
        mailbox = Mailbox(self.comm, expected, self._device, varies=self._varies)
        for m in own:
            for chunk, v in enumerate(virtual_stages):
                x = source.inputs(m) if v == 0 else mailbox.receive()
                y, _ = self.chunks[chunk].forward(weights, x, context(m))
                if v + 1 == pipeline.virtual_stages:
                    judge(m, y)
                else:
                    self.send(mailbox, y, v + 1, m, activation=True)
        mailbox.finish()

    def receive(self, mailbox: Mailbox, action: Compute) -> Array:
        source, start = mailbox.next_source, perf_counter()
        name = f"receive for {action.letter}{action.micro_batch}"
        with self._span(name, "wait", source=source):
            found = mailbox.receive()
        self.waited[source] = self.waited.get(source, 0.0) + perf_counter() - start
        return found

    def send(
        self, mailbox: Mailbox, array: Array, virtual: int, micro_batch: int, *, activation: bool
    ) -> None:
        with self._span(f"send {micro_batch}", "communicate"):
            target, tag = self._rank(virtual, micro_batch), _tag(virtual, activation)
            mailbox.send(array, target, tag, is_gradient=not activation)

    def compute(self, action: Compute) -> AbstractContextManager[Any]:
        name = f"{action.letter}{action.micro_batch}"
        return self._span(name, "compute", micro_batch=action.micro_batch, chunk=action.chunk)

    def virtual_stage(self, action: Compute) -> tuple[int, bool]:
        """Number of the virtual stage of an action, and whether it is the last."""
        virtual = action.chunk * self.pipeline.stages + self.place.stage
        return virtual, virtual + 1 == self.pipeline.virtual_stages

    def _rank(self, virtual: int, micro_batch: int) -> int:
        """The rank that has a micro-batch in a virtual stage, with our part of the layers."""
        stage = virtual % self.pipeline.stages
        replica = self.pipeline.replica(stage, micro_batch)
        return self.layout.rank(self.place._replace(stage=stage, replica=replica))

    def _arrivals(self) -> list[tuple[int, int, int, Spec]]:
        """(micro-batch, rank, tag, spec) of the messages that our actions need, in order."""
        arrivals = []
        for action in self.actions:
            if isinstance(action, (Update, BackwardWeight)):
                continue
            virtual, _ = self.virtual_stage(action)
            m, forward = action.micro_batch, isinstance(action, Forward)
            other = virtual - 1 if forward else virtual + 1
            if 0 <= other < self.pipeline.virtual_stages:
                spec = self.specs[virtual if forward else other]
                arrivals.append((m, self._rank(other, m), _tag(virtual, forward), spec))
        return arrivals

    def _agree(self, probe: Weights, inputs: Spec, resting: Context) -> list[Spec]:
        specs = [inputs]
        for virtual in range(self.pipeline.virtual_stages - 1):
            chunk, stage = divmod(virtual, self.pipeline.stages)
            found = None
            if stage == self.place.stage:
                sample = self._device.xp.zeros((1, *specs[-1].shape), specs[-1].dtype)
                y, _ = self.chunks[chunk].forward(probe, sample, resting)
                found = Spec(y.shape[1:], y.dtype)
            first = [Coordinates(stage, 0, 0, part) for part in range(self.layout.context)]
            every = [self.comm.bcast(found, self.layout.rank(place)) for place in first]
            specs.append(every[self.place.context])
        return specs


class _Passes:
    """Passes of the micro-batches of one run.

    Attributes:
        loss: own part of the loss since the last update.
    """

    def __init__(
        self, runner: Runner, mailbox: Mailbox, source: Source, weights: WeightsInTime
    ) -> None:
        self._runner, self._mailbox, self._source, self._weights = runner, mailbox, source, weights
        self._saved: dict[tuple[int, int], tuple[Any, Array | None, Terms | None]] = {}
        self._kept: dict[tuple[int, int], Any] = {}
        self.loss: Scalar = 0.0

    def forward(self, action: Forward, context: Context) -> None:
        runner, m = self._runner, action.micro_batch
        virtual, is_last = runner.virtual_stage(action)
        x = self._source.inputs(m) if virtual == 0 else runner.receive(self._mailbox, Forward(m))
        with runner.compute(action):
            chunk = runner.chunks[action.chunk]
            y, memory = chunk.forward(self._weights.forward(m), x, context)
            if is_last:
                part, y = self._source.loss(m, y)
                self.loss = self.loss + part
        # The last stage keeps the gradient of the loss; others send an activation.
        self._saved[_key(action)] = memory, y if is_last else None, context.terms
        if not is_last:
            runner.send(self._mailbox, y, virtual + 1, m, activation=True)

    def backward(self, action: Backward | BackwardInput, emit: Emit | None) -> None:
        runner, m, saved, key = self._runner, action.micro_batch, self._saved, _key(action)
        memory, kept_dy, terms = saved.pop(key)
        dy = runner.receive(self._mailbox, action) if kept_dy is None else kept_dy
        with runner.compute(action):
            chunk = runner.chunks[action.chunk]
            dx, rest = chunk.backward(self._weights.backward(m), memory, dy, emit)
        if terms is not None:  # not forward: that may be before the update of an earlier step
            self.loss = self.loss + terms.total
        virtual, _ = runner.virtual_stage(action)
        if virtual > 0:
            runner.send(self._mailbox, dx, virtual - 1, m, activation=False)
        if emit is None:
            self._kept[key] = rest
        else:
            self._weights.done(m)

    def gradients(self, action: BackwardWeight, emit: Emit) -> None:
        m = action.micro_batch
        with self._runner.compute(action):
            chunk, kept = self._runner.chunks[action.chunk], self._kept.pop(_key(action))
            chunk.gradients(self._weights.backward(m), kept, emit)
        self._weights.done(m)


def _key(action: Compute) -> tuple[int, int]:
    return action.micro_batch, action.chunk


def reads(pipeline: Pipeline, report: Report, place: Coordinates) -> list[int]:
    """The micro-batches that a rank takes through the first or the last stage, in order."""
    ends = (0, pipeline.virtual_stages - 1)
    found = [
        action.micro_batch
        for action in report.actions[place[:2]]
        if isinstance(action, Forward) and action.chunk * pipeline.stages + place.stage in ends
    ]
    return list(dict.fromkeys(found))


def _tag(virtual: int, activation: bool) -> int:
    """Tag of messages to a virtual stage; the replay has proved that their order is enough."""
    return 2 * virtual + activation


def _last_before_updates(actions: Sequence[Action]) -> frozenset[int]:
    """Indices of the actions that give the last gradients of their chunk before an Update."""
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
