"""Execution of a rank's actions: computation, and the messages that follow from it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from collectives import Communicator
from mpitrain.arrays import Array, Gradients, Scalar
from mpitrain.device import HOST, Device
from mpitrain.nn.context import RESTING, Context, Terms
from mpitrain.parallel.grid import Coordinates, Layout
from mpitrain.parallel.store import Store, Weights
from mpitrain.pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Hop,
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
        """Agree on the shapes of messages; collective over ``comm``, all ranks of the layout.

        Args:
            comm, layout: the ranks and their layout.
            report: report of the replay of the schedule.
            chunks: our parts of the model.
            probe, resting: weights and context of a pass of no samples, which shows the shapes.
            inputs: shape and type of one sample of the data.
            span: records times.
            device: device of the arrays.
            varies: whether samples of some micro-batches have other sizes than ``inputs``.
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
        sink: Store,
        update: Callable[[int, Scalar], Updated],
        context: Callable[[int], Context] = lambda micro_batch: RESTING,
    ) -> list[Updated]:
        """Take all micro-batches of ``source`` forward and backward; returns results of ``update``.

        Args:
            source: the micro-batches.
            weights, context: weights and context for each micro-batch.
            sink: receiver of the gradients.
            update: called at each Update with its number and the own part of the loss since the
                last one.
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
        ends = pipeline.virtual_stages - 1
        own = range(self.place.replica, micro_batches, pipeline.replicas[stage])
        expected = [
            Expected(self._rank(hop), _tag(v, True), source.samples(m), self.specs[v])
            for m in own
            for v in pipeline.dealt[stage]
            if v > 0 and not self.is_here(hop := pipeline.at(v - 1, m))
        ]
        mailbox = Mailbox(self.comm, expected, self._device, varies=self._varies)
        for m in own:
            here: Array | None = None
            for chunk, v in enumerate(pipeline.dealt[stage]):
                x = source.inputs(m) if v == 0 else mailbox.receive() if here is None else here
                y, _ = self.chunks[chunk].forward(weights, x, context(m))
                here = None
                if v == ends:
                    judge(m, y)
                elif self.is_here(hop := pipeline.at(v + 1, m)):
                    here = y
                else:
                    self.send(mailbox, y, hop, m, activation=True)
        mailbox.finish()

    def receive(self, mailbox: Mailbox, action: Compute) -> Array:
        source, start = mailbox.next_source, perf_counter()
        name = f"receive for {action.letter}{action.micro_batch}"
        with self._span(name, "wait", source=source):
            found = mailbox.receive()
        self.waited[source] = self.waited.get(source, 0.0) + perf_counter() - start
        return found

    def send(
        self, mailbox: Mailbox, array: Array, hop: Hop, micro_batch: int, *, activation: bool
    ) -> None:
        with self._span(f"send {micro_batch}", "communicate"):
            tag = _tag(hop.virtual, activation)
            mailbox.send(array, self._rank(hop), tag, is_gradient=not activation)

    def compute(self, action: Compute) -> AbstractContextManager[Any]:
        name = f"{action.letter}{action.micro_batch}"
        return self._span(name, "compute", micro_batch=action.micro_batch, chunk=action.chunk)

    def is_here(self, hop: Hop) -> bool:
        """Whether this rank is that place; nothing is sent then."""
        return hop.place == self.place[:2]

    def _rank(self, hop: Hop) -> int:
        """The rank of a place that has our part of the layers."""
        return self.layout.rank(self.place._replace(stage=hop.stage, replica=hop.replica))

    def _arrivals(self) -> list[tuple[int, int, int, Spec]]:
        """(micro-batch, rank, tag, spec) of the messages that our actions need, in order."""
        arrivals = []
        for action in self.actions:
            source, _ = self.pipeline.beside(self.place.stage, action)
            if source is None or isinstance(action, Update) or self.is_here(source):
                continue
            to = self.pipeline.dealt[self.place.stage][action.chunk]
            spec = self.specs[max(to, source.virtual)]
            tag = _tag(to, isinstance(action, Forward))
            arrivals.append((action.micro_batch, self._rank(source), tag, spec))
        return arrivals

    def _agree(self, probe: Weights, inputs: Spec, resting: Context) -> list[Spec]:
        specs = [inputs]
        for virtual in range(self.pipeline.virtual_stages - 1):
            stage, _, chunk, _ = self.pipeline.at(virtual, 0)
            found = None
            if stage == self.place.stage:
                sample = self._device.put(np.zeros((0, *specs[-1].shape), specs[-1].dtype))
                y, _ = self.chunks[chunk].forward(probe, sample, resting)
                found = Spec(y.shape[1:], y.dtype)
            # Parts of positions and of columns may be unequal.
            parts = product(range(self.layout.context), range(self.layout.tensor))
            first = [Coordinates(stage, 0, tensor, context) for context, tensor in parts]
            every = [self.comm.bcast(found, self.layout.rank(place)) for place in first]
            specs.append(every[self.place.context * self.layout.tensor + self.place.tensor])
        return specs


class _Passes:
    """Passes of the micro-batches of one run; ``loss``: own part of it since the last update."""

    def __init__(
        self, runner: Runner, mailbox: Mailbox, source: Source, weights: WeightsInTime
    ) -> None:
        self._runner, self._mailbox, self._source, self._weights = runner, mailbox, source, weights
        self._saved: dict[tuple[int, int], tuple[Any, Array | None, Terms | None]] = {}
        self._kept: dict[tuple[int, int], Any] = {}
        #: Outputs that another chunk of this rank takes, by virtual stage, kind and micro-batch.
        self._here: dict[tuple[int, bool, int], Array] = {}
        self.loss: Scalar = 0.0

    def forward(self, action: Forward, context: Context) -> None:
        runner, m = self._runner, action.micro_batch
        is_first, is_last = (
            hop is None for hop in runner.pipeline.beside(runner.place.stage, action)
        )
        x = self._source.inputs(m) if is_first else self._take(action)
        with runner.compute(action):
            chunk = runner.chunks[action.chunk]
            y, memory = chunk.forward(self._weights.forward(m), x, context)
            if is_last:
                part, y = self._source.loss(m, y)
                self.loss = self.loss + part
        # The last stage keeps the gradient of the loss; others send an activation.
        self._saved[_key(action)] = memory, y if is_last else None, context.terms
        self._hand_on(action, y)

    def backward(self, action: Backward | BackwardInput, emit: Emit | None) -> None:
        runner, m, saved, key = self._runner, action.micro_batch, self._saved, _key(action)
        memory, kept_dy, terms = saved.pop(key)
        dy = self._take(action) if kept_dy is None else kept_dy
        with runner.compute(action):
            chunk = runner.chunks[action.chunk]
            dx, rest = chunk.backward(self._weights.backward(m), memory, dy, emit)
        # Not forward: that may be before the update of an earlier step.
        if terms is not None and terms.total is not None:
            self.loss = self.loss + terms.total
        self._hand_on(action, dx)
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

    def _take(self, action: Compute) -> Array:
        """The input of an action from another place."""
        runner = self._runner
        virtual = runner.pipeline.dealt[runner.place.stage][action.chunk]
        key = virtual, isinstance(action, Forward), action.micro_batch
        found = self._here.pop(key, None)
        return runner.receive(self._mailbox, action) if found is None else found

    def _hand_on(self, action: Compute, array: Array) -> None:
        """Give the output of an action to the place that takes it."""
        runner, m, activation = self._runner, action.micro_batch, isinstance(action, Forward)
        _, target = runner.pipeline.beside(runner.place.stage, action)
        if target and runner.is_here(target):
            self._here[target.virtual, activation, m] = array
        elif target:
            runner.send(self._mailbox, array, target, m, activation=activation)


def _key(action: Compute) -> tuple[int, int]:
    return action.micro_batch, action.chunk


def reads(pipeline: Pipeline, report: Report, place: Coordinates) -> list[int]:
    """The micro-batches that a rank takes through the first or the last stage, in order."""
    ends, dealt = (0, pipeline.virtual_stages - 1), pipeline.dealt[place.stage]
    found = [
        action.micro_batch
        for action in report.actions[place[:2]]
        if isinstance(action, Forward) and dealt[action.chunk] in ends
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
