"""Seconds and bytes of the stages of a layout."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.nn.positions import Way
from mpitrain.parallel.grid import axes
from mpitrain.pipeline.simulate import PassTimes
from mpitrain.search.layers import LayerCost
from mpitrain.search.machine import Machine

Numbers = npt.NDArray[np.float64]
#: Layers ``first <= layer < stop``.
Span = tuple[int, int]


@dataclass(frozen=True)
class Candidate:
    """A layout, all but the cut into stages.

    Attributes:
        pipe, data, tensor: stages, replicas of each, ranks that share each layer.
        sequence: whether the tensor ranks share the positions between the layers, too.
        zero: ZeRO level.
        recompute: whether activations are computed again.
        micro_batches: micro-batches of each replica in a step.
        context: ranks that share the positions of a sample.
        experts: ranks over which experts, or a recommender's tables, are spread.
        attention: how context ranks attend to all positions.
        node_shared: whether the replicas share one copy of the parameters.
    """

    pipe: int
    data: int
    tensor: int
    sequence: bool = False
    zero: int = 0
    recompute: bool = False
    micro_batches: int = 1
    context: int = 1
    experts: int = 1
    attention: Way = "zigzag"
    node_shared: bool = False

    @property
    def summing(self) -> int:
        """Ranks that sum their gradients."""
        return self.data * self.context

    def __str__(self) -> str:
        text = axes(self.data, self.pipe, self.tensor, self.context, self.experts)
        extras = ["sequence"] * self.sequence + ["recompute"] * self.recompute
        extras += ["node_shared"] * self.node_shared
        if self.zero:
            extras.append(f"ZeRO-{self.zero}")
        return ", ".join([text, *extras, f"{self.micro_batches} micro-batches"])


@dataclass(frozen=True)
class Numerics:
    """Sizes of numbers.

    Attributes:
        stored: bytes of a parameter, a gradient and a number of the optimiser's state.
        computed: bytes of an activation.
        slots: numbers of optimiser state for each parameter.
        exchanged: bytes that replicas exchange a step, over those of a plain sum of the gradients:
            codecs, and workers that do not meet in each step, exchange less.
    """

    stored: int
    computed: int
    slots: int
    exchanged: float = 1.0


@dataclass(frozen=True)
class StageCosts:
    """Costs of all stages that a layout may have; ``[i, j]`` is that of layers i to j - 1.

    Attributes:
        layers: layers of the model.
        machine: the cluster.
        layout: the layout.
        samples: samples of a micro-batch.
        numerics: bytes of numbers.
    """

    layers: Sequence[LayerCost]
    machine: Machine
    layout: Candidate
    samples: float
    numerics: Numerics

    def _sum(self, values: Sequence[float]) -> Numbers:
        """Sums of a layer's values over each stage; infinite where a stage has no layer."""
        return self._where_layers(_sums(values))

    def _where_layers(self, values: Numbers) -> Numbers:
        """The values of stages; infinite where a stage has no layer."""
        at = np.arange(len(self.layers) + 1)
        return np.where(at[:, None] < at[None, :], values, np.inf)

    @cached_property
    def forward(self) -> Numbers:
        """Seconds of a forward pass of a micro-batch, sums over the tensor ranks included."""
        return self._passes(1, [layer.forward for layer in self.layers])

    @cached_property
    def backward(self) -> Numbers:
        """Seconds of a backward pass of a micro-batch, with the recomputation."""
        again = self.forward if self.layout.recompute else 0.0
        return self._passes(2, [layer.backward for layer in self.layers]) + again

    def _passes(self, count: int, work: Sequence[float]) -> Numbers:
        """Seconds of a pass that does ``work`` and moves the numbers of ``count`` forward passes,
        which write and read what they keep."""
        own, machine = self.layout, self.machine
        ranks = own.tensor * own.context
        seconds = [
            self.samples * (done / machine.rate / ranks + 2 * count * kept / machine.stream)
            + count * machine.launch
            + self._inside(layer, count)
            for layer, done, kept in zip(self.layers, work, self._kept, strict=True)
        ]
        return self._sum(seconds) + machine.call

    def _inside(self, layer: LayerCost, count: int) -> float:
        """Seconds in which ranks that share a layer talk, in a pass that ``count`` is 2 for if it
        goes backward."""
        own, machine = self.layout, self.machine
        nbytes, seconds = self.samples * self.numerics.computed, 0.0
        if own.tensor > 1:
            # A layer sums at its Leaves forward and at its Enters backward.
            for numbers in layer.summed:
                sent = nbytes * numbers / own.context
                seconds += (machine.allreduce(sent, own.tensor, 1) + machine.call) / 2
        if own.experts > 1 and layer.rows:  # there and back
            sent = nbytes * layer.rows / own.context / 2
            stride = own.tensor
            seconds += 2 * (machine.scatter(sent, own.experts, stride) + machine.call)
        if own.context > 1 and layer.keys:  # their gradients travel with keys and values
            times = 2 / own.context if own.attention == "ulysses" else count
            sent = times * nbytes * layer.keys / own.tensor
            seconds += machine.scatter(sent, own.context, own.tensor)
            seconds += machine.call * (own.context - 1)
        return seconds

    @property
    def _kept(self) -> list[float]:
        """Bytes of a sample that each layer keeps on a rank for the backward pass."""
        own = self.layout
        whole = own.tensor if own.sequence else 1
        return [
            self.numerics.computed
            / own.context
            * (
                layer.kept / whole
                + (layer.kept_shared + layer.scores * (own.context == 1)) / own.tensor
            )
            for layer in self.layers
        ]

    @cached_property
    def _outputs(self) -> Numbers:
        """Bytes of the output of each layer for a micro-batch on a rank."""
        ranks = self.layout.context * (self.layout.tensor if self.layout.sequence else 1)
        each = self.samples * self.numerics.computed / ranks
        return np.array([layer.outputs * each for layer in self.layers])

    @cached_property
    def message(self) -> Numbers:
        """Seconds of the activation of a micro-batch, from each stage to the next one."""
        distance = self.layout.summing * self.layout.tensor
        sent = [self.machine.message(n, distance) + self.machine.call for n in self._outputs]
        sent[-1] = 0.0
        return self._where_layers(np.array([0.0, *sent])[None, :])

    @cached_property
    def _parameters(self) -> Numbers:
        """Numbers of parameters of a rank, before ZeRO shares them, without those in ``_placed``.

        A stage without the first layer has the parameters that are tied to it, too.
        """
        own, numbers = self.layout, [layer.parameters - layer.placed for layer in self.layers]
        tied = _sums([layer.tied for layer in self.layers])
        tied[0] = 0.0
        whole = _sums(numbers) if own.experts > 1 else _sums([n.parameters for n in self.layers])
        return (whole + tied) / own.tensor

    @cached_property
    def _placed(self) -> Numbers:
        """Numbers of parameters that only some of the replicas have, as experts are spread."""
        own = self.layout
        spread = _sums([layer.placed / own.experts / own.tensor for layer in self.layers])
        return spread * (own.experts > 1)

    @cached_property
    def parameters(self) -> Numbers:
        """Numbers of parameters of a rank, before ZeRO shares them."""
        return self._where_layers(self._parameters + self._placed)

    @cached_property
    def update(self) -> Numbers:
        """Seconds of a step's exchange among replicas that no backward pass hides.

        ZeRO 2 and 3 sum each micro-batch's gradients; ZeRO 3 gathers parameters before each pass.
        """
        count = _sums([1.0] * len(self.layers))
        found = self._exchange(self._parameters, self._placed, self.backward, count)
        return self._where_layers(found)

    @property
    def _times(self) -> float:
        """Reduce-scatters of all gradients that send as much as a step does."""
        own = self.layout
        if own.zero == 3:
            return 3.0 * own.micro_batches
        return own.micro_batches + 1.0 if own.zero == 2 else 2.0

    def _sharing(self) -> Iterator[tuple[bool, int, int]]:
        """The ranks that sum gradients: whether of placed parameters, how many, how far apart."""
        own = self.layout
        yield False, own.summing, own.tensor
        yield True, own.summing // own.experts, own.tensor * own.experts

    def _exchange(self, plain: Any, placed: Any, backward: Any, layers: Any) -> Any:
        """Seconds of the exchange for stages of so many parameters, that no pass hides."""
        own, machine = self.layout, self.machine
        scattered = own.zero >= 2
        # ZeRO 2 and 3 have a message for each layer, of each micro-batch.
        messages = layers if scattered else 1
        once, calls = 0.0 * plain, 0.0 * plain
        for is_placed, size, stride in self._sharing():
            numbers = placed if is_placed else plain
            if size > 1 and np.any(numbers):
                nbytes = self.numerics.exchanged * self.numerics.stored * numbers
                link = machine.link(size, stride)
                once += (size - 1) * (link.alpha * messages + link.beta * nbytes / size)
                calls += machine.call * self._times * messages
        hidden = backward * (own.micro_batches if scattered else 1)
        return np.maximum(self._times * once - hidden, 0) + calls

    @cached_property
    def seconds(self) -> Numbers:
        """Seconds of a micro-batch: both passes, its messages, its part of the step's exchange."""
        found: Numbers = (
            self.forward
            + self.backward
            + 2 * self.message
            + self.update / self.layout.micro_batches
        )
        return found

    @cached_property
    def _state(self) -> Numbers:
        """Bytes of a rank's parameters, gradients and state of the optimiser."""
        return self._where_layers(self._held(self._parameters, self._placed))

    def _held(self, plain: Any, placed: Any) -> Any:
        """Bytes of a rank for so many parameters, of which some are placed."""
        own = self.layout
        levels = (own.zero == 3 or own.node_shared, own.zero >= 2, own.zero or own.node_shared)
        shards = [1 / own.summing if shared else 1.0 for shared in levels]
        lone = [own.experts / own.summing if shared else 1.0 for shared in levels]
        return plain * self._bytes(shards) + placed * self._bytes(lone)

    def _bytes(self, shards: Sequence[float]) -> float:
        """Bytes of a parameter, with its gradient and state, of which a rank has these parts."""
        numerics = self.numerics
        found = numerics.stored * (shards[0] + shards[1] + numerics.slots * shards[2])
        copied = numerics.computed != numerics.stored
        return found + copied * numerics.computed * shards[0]

    @cached_property
    def activations(self) -> Numbers:
        """Bytes that a micro-batch keeps on a rank from its forward to its backward pass."""
        if self.layout.recompute:
            return self._sum([self.samples * self._kept[0], *self._outputs[:-1]])
        return self.samples * self._sum(self._kept)

    @property
    def working(self) -> float:
        """Bytes of the activations of the layer that is computed again."""
        return self.samples * max(self._kept) if self.layout.recompute else 0.0

    def _total(self, values: Numbers, spans: Sequence[Span]) -> float:
        """The sum of the values of a stage's chunks."""
        return float(sum(values[span] for span in spans))

    def _plain(self, spans: Sequence[Span]) -> float:
        """Numbers of a stage's parameters but the placed ones; tied ones count once."""
        found = self._total(self._parameters, spans)
        if any(first == 0 for first, _ in spans):
            later = [layer for a, b in spans if a for layer in self.layers[a:b]]
            found -= sum(layer.tied for layer in later) / self.layout.tensor
        return found

    def memory(self, in_flight: int) -> Numbers:
        """Bytes of a rank: parameters, gradients, state, activations of ``in_flight`` parts."""
        return self._state + in_flight * self.activations + self.working

    def state(self, spans: Sequence[Span]) -> float:
        """Bytes of the parameters, gradients and optimiser's state of a stage of these chunks."""
        return float(self._held(self._plain(spans), self._total(self._placed, spans)))

    def kept(self, spans: Sequence[Span], held: int) -> float:
        """Bytes of the activations of ``held`` micro-batches in a chunk of a stage."""
        return held * self._total(self.activations, spans) / len(spans) + self.working

    def count(self, spans: Sequence[Span]) -> float:
        """Numbers of a rank's parameters before ZeRO shares them."""
        return self._plain(spans) + self._total(self._placed, spans)

    def times(self, first: int, stop: int) -> PassTimes:
        """Times of a stage for the simulator of schedules."""
        return self.stage_times([(first, stop)])[0]

    def stage_times(self, spans: Sequence[Span]) -> list[PassTimes]:
        """Times of the chunks of a stage; the first one has the stage's update."""
        update = self._exchange(
            self._plain(spans),
            self._total(self._placed, spans),
            self._total(self.backward, spans),
            float(sum(stop - first for first, stop in spans)),
        )
        found = []
        for span in spans:
            backward = self.backward[span]
            again = self.forward[span] if self.layout.recompute else 0.0
            weights = (backward - again) / 2
            found.append(
                PassTimes(
                    float(self.forward[span]),
                    float(backward - weights),
                    float(weights),
                    float(self.message[span]),
                    float(update),
                )
            )
        return found

    def sent(self, spans: Sequence[Span]) -> dict[str, float]:
        """Bytes that a rank of a stage of these chunks sends in a step, by purpose."""
        own, numerics = self.layout, self.numerics
        found = {"gradients": 0.0, "pipe": 0.0, "tensor": 0.0, "context": 0.0, "experts": 0.0}
        for is_placed, size, _ in self._sharing():
            numbers = self._total(self._placed, spans) if is_placed else self._plain(spans)
            nbytes = numbers * numerics.stored * numerics.exchanged
            found["gradients"] += self._times * (size - 1) / size * nbytes
        # Neighbouring chunks of a stage tell each other nothing, as at the tip of a V.
        ends = {0, len(self.layers)} | {a for a, _ in spans} & {b for _, b in spans}
        for first, stop in spans:
            found["pipe"] += sum(self._outputs[at - 1] for at in {first, stop} - ends)
            for layer in self.layers[first:stop]:
                for key, numbers in self._told(layer).items():
                    found[key] += self.samples * numerics.computed * numbers
        return {
            key: value * (1 if key == "gradients" else own.micro_batches)
            for key, value in found.items()
        }

    def _told(self, layer: LayerCost) -> dict[str, float]:
        """Numbers that a rank tells those that share a layer with it, for a sample."""
        own = self.layout
        again = 1.5 if own.recompute else 1.0
        t, c, x = ((size - 1) / size for size in (own.tensor, own.context, own.experts))
        times = 4 / own.context if own.attention == "ulysses" else 3
        return {
            "tensor": 2 * t * again * sum(layer.summed) / own.context,
            "context": c * times * layer.keys / own.tensor,
            "experts": x * 2 * layer.rows / own.context,
        }


def _sums(values: Sequence[float]) -> Numbers:
    """Sums of the values i to j - 1, as ``[i, j]``."""
    ends = np.concatenate([[0.0], np.cumsum(values)])
    sums: Numbers = ends[None, :] - ends[:, None]
    return sums
