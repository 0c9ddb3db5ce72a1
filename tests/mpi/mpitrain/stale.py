"""A simulation of an asynchronous pipeline's stale weights in one process."""

from itertools import pairwise
from math import ceil, lcm

from mpi4py import MPI
from msgspec.structs import replace

from mpitrain import nn
from mpitrain.checkpoint.saving import resume
from mpitrain.config import Parallel
from mpitrain.nn.layer import go_forward
from mpitrain.start import start
from mpitrain.training.batches import MicroBatches, part
from mpitrain.training.partition import layout_of
from mpitrain.training.parts import UserObjects


def ahead(replicas):
    """Micro-batches that a replica of the first of these stages sends ahead."""
    if len(replicas) == 1:
        return 0
    own, after = replicas[:2]
    return ceil(after * (ahead(replicas[1:]) + 1) / own) + (own != after)


class Simulation:
    """All stages in one process; every version of the weights is kept."""

    def __init__(self, config, replicas, layers=None, *, resumed=False):
        self.policy, self.accumulate = config.parallel.weights, config.train.micro_batches
        self.replicas, self.stages = replicas, len(replicas)
        self.parts = self.accumulate * lcm(*replicas)
        self.config = config
        stages = self.stages
        plain = replace(config, parallel=Parallel())
        with start(MPI.COMM_SELF, plain, objects=UserObjects(layers=layers)) as trainer:
            self.model, self.sampler = trainer.parts.model, trainer.parts.sampler
            self.data = trainer.parts.data
            if resumed:
                resume(trainer.parts)
            (piece,), (state,) = trainer.parts.store.pieces, trainer.parts.updater.state
            weights, speed = (
                {one.name: flat[one.start : one.stop].reshape(one.shape).copy()
                 for one in trainer.parts.arena.tensors}
                for flat in (piece.parameters, state["velocity"])
            )  # fmt: skip
        names = list(self.model.layers)
        wanted = config.parallel.partition
        bounds = [len(names) * s // stages for s in range(stages + 1)]
        if isinstance(wanted, tuple):
            bounds = [sum(wanted[:s]) for s in range(stages + 1)]
        self.names = [names[a:b] for a, b in pairwise(bounds)]
        # Places of each tensor that layers share: of its owner's, and of its users'.
        stage_of = {name: stage for stage, own in enumerate(self.names) for name in own}
        self.tied = [
            [(stage_of[name], (name, own)), (stage_of[owner], (owner, full[len(owner) + 1 :]))]
            for name, layer in self.model.layers.items()
            for own, full in layer.tied.items()
            for owner in [full.partition(".")[0]]
        ]

        def by_stage(values):
            return [{name: self._of_layer(name, values) for name in own} for own in self.names]

        self.weights, self.speed = [[own] for own in by_stage(weights)], by_stage(speed)

    def _of_layer(self, name, values):
        layer = self.model.layers[name]
        return {own: values[layer.tied.get(own, f"{name}.{own}")] for own in layer.shapes()}

    def version(self, stage, micro_batch):
        """Updates of a stage before its forward pass: its replicas take turns."""
        own = micro_batch // self.replicas[stage]
        return max(0, own - ahead(self.replicas[stage:])) // self.accumulate

    def before(self, stage, micro_batch):
        """Updates of a stage before its backward pass."""
        return micro_batch // self.replicas[stage] // self.accumulate

    def due(self, stage, micro_batch):
        match self.policy:
            case "vertical":
                seen = self.version(0, micro_batch) * self.replicas[0]
                return seen // self.replicas[stage]
            case "two_buffers":
                return max(0, self.before(stage, micro_batch) - 1)
            case _:
                return self.version(stage, micro_batch)

    def forward_weights(self, stage, micro_batch, lr):
        # Weights known at that time: later versions do not exist yet.
        at = self.due(stage, micro_batch)
        latest = self.weights[stage][at]
        if self.policy not in ("spectrain", "linear"):
            return latest
        ahead = self.before(stage, micro_batch) - at

        def moved(name, key, value):
            motion = value - self.weights[stage][max(at - 1, 0)][name][key]
            if self.policy == "spectrain":
                motion = -self.rate(stage, lr) * self.history[stage][at][name][key]
            return value + ahead * motion

        return {n: {k: moved(n, k, v) for k, v in layer.items()} for n, layer in latest.items()}

    def run(self, batches, lr, first):
        """Losses of the batches from step ``first`` on; the pipeline drains after them."""
        for stage in range(self.stages):
            self.weights[stage] = self.weights[stage][-1:]
        self.history = [[speed] for speed in self.speed]
        held = {
            m: self.data.train[part(batches, self.parts, m)]
            for m in range(len(batches) * self.parts)
        }
        source = MicroBatches(
            held, batches, self.parts, self.model.loss, dtype=self.config.run.dtype,
            labels_per_sample=self.data.labels_per_sample, choices=self.model.choices,
        )  # fmt: skip
        losses, replicas = [], self.replicas
        sums = [{} for _ in range(self.stages)]
        for m in range(len(batches) * self.parts):
            x, saved = source.inputs(m), []
            context = nn.Context(
                True, self.config.run.seed, first + m // self.parts, source.indices(m),
                terms=source.terms(m),
            )  # fmt: skip
            for stage, own in enumerate(self.names):
                weights = self.forward_weights(stage, m, lr)
                for name in own:
                    x, memory = go_forward(self.model.layers[name], name, weights[name], x, context)
                    saved.append((stage, name, weights, memory))
            loss, dy = source.loss(m, x)
            losses.append(loss + (context.terms.total or 0.0))
            for stage, name, weights, memory in reversed(saved):
                if self.policy in ("spectrain", "linear", "latest"):
                    weights = self.weights[stage][-1]
                layer = self.model.layers[name]
                dy, kept = layer.backward(weights[name], memory, dy)
                for key, gradient in layer.gradients(weights[name], kept).items():
                    sums[stage][name, key] = sums[stage].get((name, key), 0) + gradient
            due = [s for s in range(self.stages) if not (m + 1) % (self.accumulate * replicas[s])]
            for places in self.tied if 0 in due else ():
                total = sum(sums[stage][own] for stage, own in places)
                for stage, own in places:
                    sums[stage][own] = total
            for stage in due:
                self.update(stage, sums[stage], self.rate(stage, lr))
                sums[stage] = {}
        return [sum(losses[i : i + self.parts]) for i in range(0, len(losses), self.parts)]

    def rate(self, stage, lr):
        """The rate of one of several updates in a step."""
        return lr / (lcm(*self.replicas) // self.replicas[stage])

    def update(self, stage, sums, lr):
        optim, updates = self.config.optim, lcm(*self.replicas) // self.replicas[stage]
        after, speed = {}, {}
        for name, layer in self.weights[stage][-1].items():
            after[name], speed[name] = {}, {}
            for key, value in layer.items():
                direction = updates * sums[name, key] + optim.weight_decay * value
                speed[name][key] = optim.momentum * self.speed[stage][name][key] + direction
                after[name][key] = value - speed[name][key] * lr
        self.weights[stage].append(after)
        self.speed[stage] = speed
        self.history[stage].append(speed)


def simulated(config, steps, layers=None, *, ranks=MPI.COMM_WORLD.size, done=0):
    """Losses of the steps after ``done``, and the weights after the last."""
    simulation = Simulation(config, layout_of(config, ranks).replicas, layers, resumed=done > 0)
    optim = config.optim
    lr = optim.lr * config.train.batch_size / (optim.reference_batch or config.train.batch_size)
    batches = list(simulation.sampler.batches(0))[:steps]
    losses = []
    for first in range(done, steps, config.parallel.window):
        losses += simulation.run(batches[first : first + config.parallel.window], lr, first)
    tied = {place for _, place in (places[0] for places in simulation.tied)}
    last = {
        f"{name}.{key}": value
        for own in simulation.weights
        for name, layer in own[-1].items()
        for key, value in layer.items()
        if (name, key) not in tied
    }
    return losses, last
