"""Seconds and bytes of the stages of a layout."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.analysis import LinkCost
from mpitrain.pipeline.simulate import PassTimes
from mpitrain.search.candidates import Candidate
from mpitrain.search.machine import Machine
from mpitrain.search.sums import LayerSums, Span

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Numerics:
    """Sizes of numbers.

    Attributes:
        stored: bytes of a parameter, a gradient and a number of the optimiser's state.
        computed: bytes of an activation.
        slots: numbers of optimiser state for each parameter.
        stepping: seconds of an optimiser's step for each parameter.
        bucket: bytes of gradients that a sum has at least.
    """

    stored: int
    computed: int
    slots: int
    stepping: float = 0.0
    bucket: float = np.inf


@dataclass(frozen=True)
class ReplicaExchange:
    """An exchange of replicas; by default, a plain sum of the gradients in each step.

    Attributes:
        share: bytes of the gradients' sum over those of a plain one: of an all-reduce, and with
            ZeRO, of a reduce-scatter.
        period: steps from one exchange to the next.
        delay: steps whose passes hide an exchange; None: the backward passes of its step do.
        kept: numbers that a rank keeps for each parameter: residuals, anchors, means.
        coding: seconds of the codec for each parameter.
    """

    share: float = 1.0
    period: int = 1
    delay: int | None = None
    kept: float = 0.0
    coding: float = 0.0


@dataclass(frozen=True)
class StageCosts:
    """Costs of the stages of a layout: numbers for a stage's sums, arrays for those of all stages.

    Attributes:
        sums: sums over the layers of each stage.
        machine: the cluster.
        layout: the layout; its stages are as wide as ``data`` says.
        samples: samples of a micro-batch.
        numerics: bytes of numbers.
        exchange: exchange of the replicas.
    """

    sums: LayerSums
    machine: Machine
    layout: Candidate
    samples: float
    numerics: Numerics
    exchange: ReplicaExchange = ReplicaExchange()

    def forward(self, of: LayerSums) -> Any:
        """Seconds of a forward pass of a micro-batch, sums over the tensor ranks included."""
        return self._pass(of, 1, of.forward, of.forward_unshared)

    def backward(self, of: LayerSums) -> Any:
        """Seconds of a backward pass of a micro-batch, with the recomputation."""
        again = self.forward(of) if self.layout.recompute else 0.0
        return self._pass(of, 2, of.backward, of.backward_unshared) + again

    def _pass(self, of: LayerSums, count: int, work: Any, unshared: Any) -> Any:
        """Seconds of a pass that does ``work``, of which tensor ranks share all but ``unshared``,
        and moves the numbers of ``count`` forward passes, which write and read what they keep."""
        own, machine = self.layout, self.machine
        if not own.sequence:
            work = work + (own.tensor - 1) * unshared
        computing = self.samples * work / machine.rate / (own.tensor * own.context)
        moving = 2 * count * self._kept(of) / machine.stream
        fixed = count * (machine.launch * of.layers + of.fixed)
        return computing + moving + fixed + self._within(of, count) + machine.call

    def _within(self, of: LayerSums, count: int) -> Any:
        """Seconds in which ranks that share a layer talk, in a pass that ``count`` is 2 for if it
        goes backward."""
        own, machine = self.layout, self.machine
        nbytes, seconds = self.samples * self.numerics.computed, 0.0
        if own.tensor > 1:
            # A layer sums at its Leaves forward and at its Enters backward; where ranks share the
            # positions around it, it scatters and gathers at both.
            sent, calls = nbytes * of.summed / own.context, of.sums / (1 if own.sequence else 2)
            seconds += machine.scatter(sent, own.tensor, 1, of.sums) + machine.call * calls
        if own.sharing > 1:  # there and back
            sent = nbytes * of.rows / own.context / 2
            each = machine.scatter(sent, own.sharing, own.tensor, of.exchanges)
            seconds += 2 * (each + machine.call * of.exchanges)
        if own.context > 1:
            is_once = self._by_ulysses
            sent = self._told[count - 1] * nbytes * of.keys / own.tensor
            times = (2 if is_once else 1 if own.rows else count) * of.rings
            seconds += machine.scatter(sent, own.context, own.tensor, times)
            seconds += machine.call * times * (1 if is_once else own.context - 1)
        return seconds

    @property
    def _by_ulysses(self) -> bool:
        return self.layout.attention == "ulysses" and not self.layout.rows

    @property
    def _told(self) -> tuple[float, float]:
        """How often context ranks tell one another their keys and values forward, and backward.

        By Ulysses, queries, keys and values go there and outputs back; else keys and values go
        round, their gradients with them, and halos go once.
        """
        if self._by_ulysses:
            return 2 / self.layout.context, 2 / self.layout.context
        return 1.0, 1.0 if self.layout.rows else 2.0

    def _kept(self, of: LayerSums) -> Any:
        """Bytes of a micro-batch that layers keep on a rank for the backward pass."""
        own = self.layout
        shared = of.kept_shared + of.scores * (own.context == 1)
        whole = own.tensor if own.sequence else 1
        return self._bytes(of.kept / whole + shared / own.tensor)

    def _between(self, numbers: Any) -> Any:
        """Bytes on a rank of so many numbers between two layers."""
        return self._bytes(numbers / (self.layout.tensor if self.layout.sequence else 1))

    def _bytes(self, numbers: Any) -> Any:
        """Bytes of the activations of a micro-batch on a context rank."""
        return self.samples * self.numerics.computed * numbers / self.layout.context

    def message(self, of: LayerSums) -> Any:
        """Seconds of the activation of a micro-batch, to the next stage, by the slowest link of a
        pipeline, which leads through all nodes."""
        distance, numbers = self.layout.summing * self.layout.tensor, of.outputs
        link = self.machine.link(self.machine.ranks // distance, distance)
        return link.beta * self._between(numbers) + (link.alpha + self.machine.call) * (numbers > 0)

    def parameters(self, of: LayerSums) -> tuple[Any, Any]:
        """Numbers of a rank's parameters before ZeRO shares them, and of placed ones, which only
        some of the replicas have."""
        own, placed = self.layout, of.placed
        plain = (of.parameters + of.tied + placed * (own.sharing == 1)) / own.tensor
        return plain, placed * (own.sharing > 1) / own.sharing / own.tensor

    def update(self, of: LayerSums) -> Any:
        """Seconds of the exchange among replicas that no backward pass hides, and of the step.

        ZeRO 2 and 3 sum each micro-batch's gradients; ZeRO 3 gathers parameters before each pass.
        A pass waits for its parameters, and the sum of the last bucket begins when all is computed.
        """
        own, ours, stepping = self.layout, self.exchange, 0.0
        times = own.micro_batches if own.zero >= 2 else 1
        summed, last, exposed = 0.0, 0.0, 0.0
        for numbers, size, stride in self._sharing(of):
            owners = size if own.zero else 1
            stepping = stepping + numbers * self.numerics.stepping / owners
            if size > 1:
                # ZeRO 2 and 3 sum each layer by itself.
                buckets = of.layers * (numbers > 0)
                if own.zero < 2:
                    count = np.ceil(self.numerics.stored * numbers / self.numerics.bucket)
                    buckets = np.minimum(np.maximum(1, count), buckets)
                its = self._summing(numbers, size, stride, buckets)
                if self.machine.hides(size, stride):
                    summed, last = summed + its, last + its / np.maximum(1, buckets * times)
                else:
                    exposed = exposed + its
                exposed = exposed + self._gathering(numbers, size, stride, buckets)
                exposed = exposed + self.machine.call * (times + self._gathers) * buckets
                exposed = exposed + ours.coding * numbers * times
        hidden = times * self.backward(of)
        if ours.delay is not None:
            hidden = ours.delay * own.micro_batches * (self.forward(of) + self.backward(of))
            last = 0.0
        return (np.maximum(summed - hidden, last) + exposed) / ours.period + stepping

    def _gathering(self, numbers: Any, size: int, stride: int, arrays: Any) -> Any:
        """Seconds in which ``size`` ranks gather their parameters in a step."""
        nbytes = self._gathers * self.numerics.stored * numbers
        return self.machine.scatter(nbytes, size, stride, self._gathers * arrays)

    def _summing(self, numbers: Any, size: int, stride: int, arrays: Any) -> Any:
        """Seconds in which ``size`` ranks sum their gradients of a step."""
        nbytes = self._sums * self.exchange.share * self.numerics.stored * numbers
        return self.machine.scatter(nbytes, size, stride, self._sums * arrays)

    @property
    def _sums(self) -> float:
        """Reduce-scatters of all gradients in a step that send as much as their sums."""
        own = self.layout
        return own.micro_batches if own.zero >= 2 else 1.0 if own.zero else 2.0

    @property
    def _gathers(self) -> float:
        """All-gathers of all parameters in a step; ZeRO 3 has them before each pass."""
        own = self.layout
        return 2.0 * own.micro_batches if own.zero == 3 else float(own.zero > 0)

    def _sharing(self, of: LayerSums) -> Iterator[tuple[Any, int, int]]:
        """Parameters of a rank, the ranks that sum their gradients, and how far these are apart."""
        own = self.layout
        plain, placed = self.parameters(of)
        yield plain, own.summing, own.tensor
        yield placed, own.summing // own.sharing, own.tensor * own.sharing

    def seconds(self, of: LayerSums) -> Any:
        """Seconds of a micro-batch: both passes, its messages, its part of the update."""
        passes = self.forward(of) + self.backward(of) + 2 * self.message(of)
        return passes + self.update(of) / self.layout.micro_batches

    def state(self, of: LayerSums) -> Any:
        """Bytes of a rank's parameters, gradients and state of the optimiser."""
        own, numerics, found = self.layout, self.numerics, 0.0
        copied = numerics.computed * (numerics.computed != numerics.stored)
        for numbers, size, _ in self._sharing(of):
            parameters = 1 / size if own.zero == 3 else 1.0
            gradients = 1 / size if own.zero >= 2 else 1.0
            slots = 1 / size if own.zero else 1.0
            shared = parameters + gradients + numerics.slots * slots + self.exchange.kept
            found = found + numbers * (numerics.stored * shared + copied * parameters)
        return found

    def activations(self, of: LayerSums) -> Any:
        """Bytes that a micro-batch keeps on a rank from its forward to its backward pass."""
        return self._between(of.inputs) if self.layout.recompute else self._kept(of)

    @cached_property
    def working(self) -> float:
        """Bytes of the activations of the layer that is computed again."""
        return float(self._kept(self.sums.each()).max()) if self.layout.recompute else 0.0

    def kept(self, of: LayerSums, held: int, chunks: int = 1) -> Any:
        """Bytes of the activations of ``held`` micro-batches in a chunk of a stage."""
        return held * self.activations(of) / chunks + self.working

    def memory(self, of: LayerSums, held: int, chunks: int = 1) -> Any:
        """Bytes of a rank."""
        return self.state(of) + self.kept(of, held, chunks)

    def passes(self, spans: Sequence[Span]) -> list[PassTimes]:
        """Times of the chunks of a stage for the simulator; the first one has the update."""
        update, found = float(self.update(self.sums.of(spans))), []
        for span in spans:
            of = self.sums.at(span)
            forward, backward = self.forward(of), self.backward(of)
            weights = (backward - forward * self.layout.recompute) / 2
            message = self.message(of)
            found.append(PassTimes(forward, backward - weights, weights, message, update))
        return found

    def sent(self, of: LayerSums) -> dict[str, float]:
        """Bytes that a rank of a stage sends in a step, by purpose."""
        own, numerics = self.layout, self.numerics
        # On links that take a second a byte, seconds are bytes.
        unit, ranks = LinkCost(0.0, 1.0), self.machine.ranks
        counting = replace(
            self, machine=replace(self.machine, inside=unit, network=unit, adapters=ranks)
        )
        shared = sum(
            counting._summing(*each, 1) + counting._gathering(*each, 1)
            for each in self._sharing(of)
        )
        forward, backward = self._told
        told = forward * (1 + own.recompute) + backward
        t, c, x = ((size - 1) / size for size in (own.tensor, own.context, own.sharing))
        each = self.samples * numerics.computed * own.micro_batches
        there = each * (2 + own.recompute)  # as much backward as forward
        return {
            "gradients": shared / self.exchange.period,
            "pipe": own.micro_batches * self._between(of.received + of.outputs),
            "tensor": there * t * of.summed / own.context,
            "context": each * c * told * of.keys / own.tensor,
            "experts": there * x * of.rows / own.context,
        }
