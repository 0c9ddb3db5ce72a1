"""A simulation of an asynchronous pipeline's stale weights in one process."""

from itertools import pairwise
from math import ceil, lcm

import numpy as np
from mpi4py import MPI
from msgspec.structs import replace

from collectives import Communicator
from mpitrain.config import Parallel
from mpitrain.start import start
from mpitrain.training.batches import MicroBatches, part
from mpitrain.training.parts import UserObjects


def ahead(replicas):
    """Micro-batches that a replica of the first of these stages sends ahead."""
    if len(replicas) == 1:
        return 0
    own, after = replicas[:2]
    return ceil(after * (ahead(replicas[1:]) + 1) / own) + (own != after)


class Simulation:
    """All stages in one process; every version of the weights is kept."""

    def __init__(self, config, replicas, layers=None):
        self.policy, self.accumulate = config.parallel.weights, config.train.micro_batches
        self.replicas, self.stages = replicas, len(replicas)
        self.parts = self.accumulate * lcm(*replicas)
        self.config = config
        stages = self.stages
        with Communicator(MPI.COMM_SELF) as one:
            plain = replace(config, parallel=Parallel())
            with start(one, plain, objects=UserObjects(layers=layers)) as trainer:
                self.model, self.sampler = trainer.parts.model, trainer.parts.sampler
                self.data = trainer.parts.data
        names = list(self.model.layers)
        wanted = config.parallel.partition
        bounds = [len(names) * s // stages for s in range(stages + 1)]
        if isinstance(wanted, tuple):
            bounds = [sum(wanted[:s]) for s in range(stages + 1)]
        self.names = [names[a:b] for a, b in pairwise(bounds)]
        seed, kind = config.run.seed, config.run.dtype
        initial = {name: self.model.drawn(name, seed, np, kind) for name in names}
        self.weights = [[{n: initial[n] for n in own}] for own in self.names]
        self.speed = [
            {n: {k: np.zeros_like(v) for k, v in initial[n].items()} for n in own}
            for own in self.names
        ]

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
        # What was known at that time: later versions do not exist yet.
        at = self.due(stage, micro_batch)
        latest = self.weights[stage][at]
        if self.policy not in ("spectrain", "linear"):
            return latest
        ahead = self.before(stage, micro_batch) - at
        moved = {}
        for name, layer in latest.items():
            moved[name] = {}
            for key, value in layer.items():
                if self.policy == "spectrain":
                    motion = -self.rate(stage, lr) * self.history[stage][at][name][key]
                else:
                    before = self.weights[stage][max(at - 1, 0)][name][key]
                    motion = value - before
                moved[name][key] = value + ahead * motion
        return moved

    def run(self, batches, lr):
        """Losses of the batches; the pipeline drains after them."""
        for stage in range(self.stages):
            self.weights[stage] = self.weights[stage][-1:]
        self.history = [[speed] for speed in self.speed]
        held = {
            m: self.data.train[part(batches, self.parts, m)]
            for m in range(len(batches) * self.parts)
        }
        source = MicroBatches(
            held, batches, self.parts, self.model.loss, dtype=self.config.run.dtype
        )
        losses = []
        sums = [{} for _ in range(self.stages)]
        for m in range(len(batches) * self.parts):
            x, saved = source.inputs(m), []
            for stage, own in enumerate(self.names):
                weights = self.forward_weights(stage, m, lr)
                for name in own:
                    x, memory = self.model.layers[name].forward(weights[name], x)
                    saved.append((stage, name, weights, memory))
            loss, dy = source.loss(m, x)
            losses.append(loss)
            for stage, name, weights, memory in reversed(saved):
                if self.policy in ("spectrain", "linear", "latest"):
                    weights = self.weights[stage][-1]
                layer = self.model.layers[name]
                dy, kept = layer.backward(weights[name], memory, dy)
                for key, gradient in layer.gradients(weights[name], kept).items():
                    sums[stage][name, key] = sums[stage].get((name, key), 0) + gradient
            for stage in range(self.stages):
                if (m + 1) % (self.accumulate * self.replicas[stage]) == 0:
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


def simulated(config, steps, layers=None):
    p = config.parallel
    replicas = p.replicas or (MPI.COMM_WORLD.size // p.pipe,) * p.pipe
    simulation = Simulation(config, replicas, layers)
    lr = config.optim.lr * config.train.batch_size / config.optim.reference_batch
    batches = list(simulation.sampler.batches(0))[:steps]
    losses = []
    for first in range(0, steps, config.parallel.window):
        losses += simulation.run(batches[first : first + config.parallel.window], lr)
    last = {
        f"{name}.{key}": value
        for own in simulation.weights
        for name, layer in own[-1].items()
        for key, value in layer.items()
    }
    return losses, last
