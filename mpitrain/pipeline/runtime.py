"""Execution of a rank's actions: computation, and the messages that follow from it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
from mpitrain.pipeline.stage import Emit, Latest, Source, Stage, WeightsInTime

#: Result of an update.
Updated = TypeVar("Updated")
#: Takes the outputs of the last stage, by the number of their micro-batch.
Judge = Callable[[int, Array], None]
#: ``span(name, category, **arguments)``: see ``mpitrain.metrics.trace.Trace.span``.
Span = Callable[..., AbstractContextManager[Any]]


def no_span(name: str, category: str, **arguments: Any) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass
class Runner:
    """Carries out the actions of one rank, again and again.

    To make one agrees on the shapes of messages; collective over ``comm``, all ranks of the layout.

    Attributes:
        comm, layout: the ranks and their layout.
        report, pipeline: report of the replay of the schedule, and the pipeline.
        chunks: our parts of the model.
        probe, resting: weights and context of a pass of no samples, which shows the shapes.
        inputs: shape and type of one sample of the data.
        span: records times.
        device: device of the arrays.
        varies: whether samples of some micro-batches have other sizes than ``inputs``.
        waited: seconds of waiting for other ranks' messages in the last run, by rank.
        specs: shape and type of the inputs of each virtual stage; sizes of some may vary.
    """

    comm: Communicator
    layout: Layout
    report: Report
    chunks: Sequence[Stage]
    probe: Weights
    inputs: Spec
    span: Span = no_span
    device: Device = HOST
    varies: bool = False
    resting: Context = RESTING

    def __post_init__(self) -> None:
        self.place = self.layout.place(self.comm.rank)
        self.pipeline = self.report.pipeline
        self.actions = self.report.actions[self.place[:2]]
        self.waited: dict[int, float] = {}
        self.specs = self._agree()
        self._last = _last_before_updates(self.actions)

    def run(
        self, source: Source, weights: WeightsInTime, sink: Store,
        update: Callable[[int, Scalar], Updated],
        context: Callable[[int], Context] = lambda micro_batch: RESTING,
    ) -> list[Updated]:  # fmt: skip
        """Take all micro-batches of ``source`` forward and backward; returns results of ``update``.

        Args:
            source: the micro-batches.
            weights, context: weights and context for each micro-batch.
            sink: receiver of the gradients.
            update: called at each Update with its number and the own part of the loss since the
                last one.
        """
        mailbox = self._mailbox(self.actions, source)
        passes = _Passes(self, mailbox, source, weights)
        updates: list[Updated] = []
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
        with self.span("sends", "wait"):
            mailbox.finish()
        return updates

    def infer(
        self, source: Source, micro_batches: int, weights: Weights, judge: Judge,
        context: Callable[[int], Context],
    ) -> None:  # fmt: skip
        """Take each micro-batch forward; the last stage gives outputs to ``judge``."""
        own = range(self.place.replica, micro_batches, self.pipeline.replicas[self.place.stage])
        actions = [Forward(m, chunk) for m in own for chunk in range(self.pipeline.chunks)]
        mailbox = self._mailbox(actions, source)
        passes = _Passes(self, mailbox, source, Latest(weights))
        for action in actions:
            passes.forward(action, context(action.micro_batch), judge)
        mailbox.finish()

    def compute(self, action: Compute) -> AbstractContextManager[Any]:
        name = f"{action.letter}{action.micro_batch}"
        return self.span(name, "compute", micro_batch=action.micro_batch, chunk=action.chunk)

    def virtual(self, action: Compute) -> int:
        """The virtual stage of an action."""
        return self.pipeline.dealt[self.place.stage][action.chunk]

    def is_here(self, hop: Hop) -> bool:
        """Whether this rank is that place; nothing is sent then."""
        return hop.place == self.place[:2]

    def rank(self, hop: Hop) -> int:
        """The rank of a place that has our part of the layers."""
        return self.layout.rank(self.place._replace(stage=hop.stage, replica=hop.replica))

    def _mailbox(self, actions: Sequence[Action], source: Source) -> Mailbox:
        """The messages of some of our actions, for which nobody has waited yet."""
        expected, self.waited = list[Expected](), {}
        for action in actions:
            hop, _ = self.pipeline.beside(self.place.stage, action)
            if hop is None or isinstance(action, Update) or self.is_here(hop):
                continue
            to, is_gradient = self.virtual(action), not isinstance(action, Forward)
            tag, spec = _tag(to, not is_gradient), self.specs[max(to, hop.virtual)]
            samples = source.samples(action.micro_batch)
            expected.append(Expected(self.rank(hop), tag, samples, spec, is_gradient))
        return Mailbox(self.comm, expected, self.device, varies=self.varies)

    def _agree(self) -> list[Spec]:
        specs = [self.inputs]
        for virtual in range(self.pipeline.virtual_stages - 1):
            stage, _, chunk, _ = self.pipeline.at(virtual, 0)
            found = None
            if stage == self.place.stage:
                sample = self.device.put(np.zeros((0, *specs[-1].shape), specs[-1].dtype))
                y, _ = self.chunks[chunk].forward(self.probe, sample, self.resting)
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

    def forward(self, action: Forward, context: Context, judge: Judge | None = None) -> None:
        """Go forward, to the loss, or to a ``judge`` in the place of the loss and what follows."""
        runner, m = self._runner, action.micro_batch
        is_first, is_last = (
            hop is None for hop in runner.pipeline.beside(runner.place.stage, action)
        )
        x = self._source.inputs(m) if is_first else self._take(action)
        with runner.compute(action):
            chunk = runner.chunks[action.chunk]
            y, memory = chunk.forward(self._weights.forward(m), x, context)
            if is_last and judge is None:
                part, y = self._source.loss(m, y)
                self.loss = self.loss + part
        if is_last and judge:
            judge(m, y)
        # The last stage keeps the gradient of the loss; others send an activation.
        if judge is None:
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
        key = runner.virtual(action), isinstance(action, Forward), action.micro_batch
        if (found := self._here.pop(key, None)) is not None:
            return found
        source, start = self._mailbox.next_source, perf_counter()
        name = f"receive for {action.letter}{action.micro_batch}"
        with runner.span(name, "wait", source=source):
            found = self._mailbox.receive()
        runner.waited[source] = runner.waited.get(source, 0.0) + perf_counter() - start
        return found

    def _hand_on(self, action: Compute, array: Array) -> None:
        """Give the output of an action to the place that takes it."""
        runner, m, activation = self._runner, action.micro_batch, isinstance(action, Forward)
        _, target = runner.pipeline.beside(runner.place.stage, action)
        if target and runner.is_here(target):
            self._here[target.virtual, activation, m] = array
        elif target:
            to, tag = runner.rank(target), _tag(target.virtual, activation)
            with runner.span(f"send {m}", "communicate"):
                self._mailbox.send(array, to, tag, is_gradient=not activation)


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
