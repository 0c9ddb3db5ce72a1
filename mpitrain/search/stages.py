"""Seconds and bytes of the stages of a layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mpitrain.parallel.grid import axes
from mpitrain.pipeline.simulate import PassTimes
from mpitrain.search.layers import LayerCost
from mpitrain.search.machine import Machine

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Candidate:
    """A layout, all but the cut into stages.

    Attributes:
        pipe, data, tensor: stages, replicas of each, ranks that share each layer.
        sequence: whether the tensor ranks share the positions between the layers, too.
        zero: ZeRO level.
        recompute: whether activations are computed again.
        micro_batches: micro-batches of each replica in a step.
    """

    pipe: int
    data: int
    tensor: int
    sequence: bool = False
    zero: int = 0
    recompute: bool = False
    micro_batches: int = 1

    def __str__(self) -> str:
        text = axes(self.data, self.pipe, self.tensor)
        extras = ["sequence"] * self.sequence + ["recompute"] * self.recompute
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
    """

    stored: int
    computed: int
    slots: int


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
        ends = np.concatenate([[0.0], np.cumsum(values)])
        sums = ends[None, :] - ends[:, None]
        at = np.arange(len(ends))
        return np.where(at[:, None] < at[None, :], sums, np.inf)

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
        tensor, machine = self.layout.tensor, self.machine
        seconds = [
            self.samples * (own / machine.rate / tensor + 2 * count * kept / machine.stream)
            + count * machine.launch
            for own, kept in zip(work, self._kept, strict=True)
        ]
        if tensor > 1:
            nbytes = self.samples * self.numerics.computed
            for index, layer in enumerate(self.layers):
                # A layer sums at its Leaves forward and at its Enters backward.
                sums = [machine.allreduce(nbytes * n, tensor, 1) for n in layer.summed]
                seconds[index] += sum(sums) / 2
        return self._sum(seconds)

    @property
    def _kept(self) -> list[float]:
        """Bytes of a sample that each layer keeps on a rank for the backward pass."""
        tensor, itemsize = self.layout.tensor, self.numerics.computed
        whole = tensor if self.layout.sequence else 1
        return [
            itemsize * (layer.kept / whole + layer.kept_shared / tensor) for layer in self.layers
        ]

    @cached_property
    def message(self) -> Numbers:
        """Seconds of the activation of a micro-batch, from each stage to the next one."""
        nbytes = self.samples * self.numerics.computed
        distance = self.layout.data * self.layout.tensor
        sent = [self.machine.message(nbytes * layer.outputs, distance) for layer in self.layers]
        sent[-1] = 0.0
        at = np.arange(len(self.layers) + 1)
        return np.where(at[:, None] < at[None, :], np.array([0.0, *sent])[None, :], np.inf)

    @cached_property
    def parameters(self) -> Numbers:
        """Numbers of parameters of a rank, before ZeRO shares them."""
        return self._sum([layer.parameters / self.layout.tensor for layer in self.layers])

    @cached_property
    def update(self) -> Numbers:
        """Seconds of a step's exchange among replicas that no backward pass hides.

        ZeRO 2 and 3 sum each micro-batch's gradients; ZeRO 3 gathers parameters before each pass.
        """
        own, machine = self.layout, self.machine
        if own.data == 1:
            return np.where(np.isfinite(self.parameters), 0.0, np.inf)
        times = 2.0 if own.zero < 2 else own.micro_batches + 1.0
        if own.zero == 3:
            times = 3.0 * own.micro_batches
        link = machine.link(own.data, own.tensor)
        nbytes = self.numerics.stored * self.parameters
        once = (own.data - 1) * (link.alpha + link.beta * nbytes / own.data)
        hidden = self.backward * (own.micro_batches if own.zero >= 2 else 1)
        exposed: Numbers = np.where(
            np.isfinite(once),
            np.maximum(times * once - np.where(np.isfinite(hidden), hidden, 0), 0),
            np.inf,
        )
        return exposed

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

    def memory(self, in_flight: int) -> Numbers:
        """Bytes of a rank: parameters, gradients, state, activations of ``in_flight`` parts."""
        own, numerics = self.layout, self.numerics
        shards = [1 / own.data if own.zero >= level else 1.0 for level in (3, 2, 1)]
        each = shards[0] + shards[1] + numerics.slots * shards[2]
        nbytes = numerics.stored * each * self.parameters
        if numerics.computed != numerics.stored:
            nbytes = nbytes + numerics.computed * self.parameters * shards[0]
        if own.recompute:
            whole = own.tensor if own.sequence else 1
            read = [layer.outputs / whole * numerics.computed for layer in self.layers[:-1]]
            kept = self.samples * self._sum([self._kept[0], *read])
            return nbytes + in_flight * kept + self.samples * max(self._kept)
        return nbytes + in_flight * self.samples * self._sum(self._kept)

    def times(self, first: int, stop: int) -> PassTimes:
        """Times of a stage for the simulator of schedules."""
        backward = self.backward[first, stop]
        again = self.forward[first, stop] if self.layout.recompute else 0.0
        weights = (backward - again) / 2
        return PassTimes(
            float(self.forward[first, stop]),
            float(backward - weights),
            float(weights),
            float(self.message[first, stop]),
            float(self.update[first, stop]),
        )
