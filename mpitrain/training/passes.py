"""Forward and backward passes of this rank's layers."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from collectives import Communicator
from mpitrain import extras, nn
from mpitrain.arrays import Array, as_inputs
from mpitrain.config import ConfigError
from mpitrain.data import DataError
from mpitrain.group import TensorGroup
from mpitrain.nn.context import RESTING, Terms
from mpitrain.parallel.grid import Coordinates, Layout
from mpitrain.parallel.precision import CastWeights, compute_type
from mpitrain.parallel.store import Weights
from mpitrain.pipeline.actions import Pipeline
from mpitrain.pipeline.mailbox import Spec
from mpitrain.pipeline.replay import Report
from mpitrain.pipeline.runtime import Runner
from mpitrain.pipeline.stage import Stage
from mpitrain.ranks.together import together
from mpitrain.training.batches import MicroBatches
from mpitrain.training.feed import Held
from mpitrain.training.partition import cut_of, schedule_of

if TYPE_CHECKING:
    from mpitrain.training.parts import Parts


class Passes:
    """Runs the pipeline stages of this rank together with the ranks of the other stages.

    Attributes:
        state: state of the layers besides parameters, by name.
        dtype: type of activations.
        cut: how ranks share positions or rows of a sample; None: each has whole ones.
        weights: parameters as layers see them.
    """

    def __init__(self, parts: "Parts", state: Mapping[str, Array]) -> None:
        """Cut this rank's layers into stages; ``state``: arrays besides parameters, by name."""
        grid, config, data, store = parts.grid, parts.config, parts.data, parts.store
        self._comm, self._layout, self._place = grid.comm, grid.layout, grid.place
        for comm in filter(None, (grid.data, grid.tensor.comm)):
            comm.watch()  # the program's code may branch on a rank's samples or features
        self._replicas = TensorGroup(grid.data)
        self._config, self._data, self._model = config, data, parts.model
        self._span, self._device = parts.span, parts.device
        self.state = state
        self.dtype = compute_type(config.run.compute, config.run.dtype)
        self._cast = None
        if config.run.compute != "same":
            self._cast = CastWeights(store, self.dtype, keeps=config.parallel.zero < 3)
        self.weights: Weights = self._cast or store
        self._schedule = parts.partition.schedule
        every = parts.partition.of_stage(0)[0]  # others hand their gradient on
        trained = (n for n, name in enumerate(every) if parts.model.layers[name].shapes())
        self._leading = frozenset(every[: next(trained, len(every)) + 1])
        self._stages: list[Stage] = []
        first = 0
        for chunk in parts.partition.of_stage(grid.place.stage):
            own = [parts.model.layers[name] for name in chunk]
            self._stages.append(Stage(own, first, chunk, self._leading))
            first += len(chunk)
        kind, shape = self.taken(np.empty(0, data.input_dtype)).dtype, data.input_shape
        self.cut = cut_of(config, grid.context, data)
        if self.cut:
            shape = (len(np.arange(shape[0])[self.cut.own]), *shape[1:])
        self._inputs = Spec(shape, kind)
        self._schedules: dict[int, tuple[Pipeline, Report]] = {}
        self._runners: dict[int, Runner] = {}

    def among(self, comm: Communicator, layout: Layout) -> "Passes":
        """Passes of these layers with other ranks; layers do not communicate between replicas."""
        found = copy(self)
        found._comm, found._layout = comm, layout
        found._replicas = TensorGroup()
        found._schedules, found._runners = {}, {}
        return found

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a batch."""
        return self.schedule()[0].micro_batches

    def schedule(self, steps: int = 1) -> tuple[Pipeline, Report]:
        """The schedule of ``steps`` steps without draining, and its proof."""
        if steps not in self._schedules:
            self._schedules[steps] = schedule_of(self._config, self._schedule, self._layout, steps)
        return self._schedules[steps]

    def runner(self, steps: int = 1) -> Runner:
        """The runner of the schedule of ``steps`` steps; the first call is collective."""
        if steps not in self._runners:
            _, report = self.schedule(steps)
            self._runners[steps] = Runner(
                self._comm, self._layout, report, self._stages, self.weights, self._inputs,
                span=self._span, device=self._device, varies=self._data.varies,
                resting=self.resting(),
            )  # fmt: skip
        return self._runners[steps]

    def source(
        self, held: Held, batches: Sequence[Array], scale: float = 1.0, parts: int = 0
    ) -> MicroBatches:
        """Micro-batches of these batches, with the loss; ``scale`` multiplies its gradient.

        ``parts``: micro-batches of each batch; 0: those of a step.
        """
        each, loss = self._data.labels_per_sample, self._model.loss
        return MicroBatches(
            held, batches, parts or self.micro_batches, loss, each, self.dtype, scale, self._device,
            self.cut, self._model.choices,
        )  # fmt: skip

    def context(self, step: int, indices: Array, terms: Terms | None = None) -> nn.Context:
        """The context of a step, counted from 0, for layers, with samples of these ``indices``.

        ``terms`` are those of the loss that layers add.
        """
        return replace(
            self.resting(indices), training=True, step=step, terms=terms, replicas=self._replicas
        )  # fmt: skip

    def resting(self, indices: Array = RESTING.samples) -> nn.Context:
        """The context that layers get with a micro-batch of a test; ``indices``: its samples."""
        run = self._config.run
        return nn.Context(
            seed=run.seed, samples=indices, state=self.state, keyed=run.random == "keyed",
            positions=self.cut if extras.Positions.made(self.cut) else None,
            leading=self._leading,
        )  # fmt: skip

    def through(self, x: Array | None = None) -> Array | None:
        """Take samples, or two of the data set, through all stages as in a test; collective.

        Returns the outputs on the ranks of the last stage, None on others.  ConfigError, DataError,
        RuntimeError and TypeError of a layer become errors of all ranks.
        """
        pipeline, _ = self.schedule()
        own: Array | None = None
        for virtual in range(pipeline.virtual_stages):
            stage, _, chunk, _ = pipeline.at(virtual, 0)

            def act(stage: int = stage, chunk: int = chunk, x: Array | None = x) -> Array | None:
                return self._forward(chunk, x) if stage == self._place.stage else None

            own = together(self._comm, act, ConfigError, DataError, RuntimeError, TypeError)
            x = self._comm.bcast(own, self._layout.rank(Coordinates(stage, 0, 0)))
        return own

    def taken(self, inputs: Array) -> Array:
        """Inputs of samples in the type in which the first layer takes them."""
        return as_inputs(inputs, self.dtype, self._model.choices)

    def _forward(self, chunk: int, x: Array | None) -> Array:
        """Outputs of one of this rank's stages; ``x`` is None for two samples of the data set."""
        if x is None:
            x = self.taken(self._data.train[:2].inputs)
        y, _ = self._stages[chunk].forward(self.weights, self._device.put(x), self.resting())
        return self._device.get(y)

    def forget_rounded(self) -> None:
        """Drop the rounded parameters, as the parameters have changed."""
        if self._cast:
            self._cast.forget()
