"""Mistakes by which layouts train other numbers than plain torch, planted in drawn programs.

Each kind has ways, which change a program.  Each run has a program of its own, so that what a way
keeps begins anew.
"""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.parts import Backward, Of, graded, linear, slope
from tests.zoo.programs import CLASSES, SAMPLES, Program


def between(f, **has):
    """A way that computes ``f(module, x)`` behind the first part."""

    def way(program: Program) -> None:
        program.parts.insert(1, lambda: Of(f, **{name: make() for name, make in has.items()}))
        if "norm" in has:
            program.given["micro_batches"] = 1

    return way


def loss_by(f):
    """A way whose loss is ``f(mean, outputs, kept)``; ``kept`` counts calls and has the program."""

    def way(program: Program) -> None:
        usual, kept = program.loss, SimpleNamespace(calls=0, mean=1.0, program=program)
        program.form = "whole" if program.form == "own loss" else program.form

        def loss(y, t):
            kept.calls += 1
            found = usual(y, t)
            return f(found[0] / found[1] if isinstance(found, tuple) else found, y, kept)

        program.loss = loss

    return way


def stepping(kind, schedule=None):
    """A way whose optimiser is of this kind of SGD."""

    def way(program: Program) -> None:
        program.optimizer = lambda p: kind(p, lr=0.02, momentum=0.5)
        program.schedule = schedule
        if not schedule:
            program.given.pop("schedule_by", None)

    return way


def ticks(module):
    """Number of this call."""
    module.calls = getattr(module, "calls", 0) + 1
    return module.calls


def bent(x, by):
    """A bend that no norm takes back."""
    return x + 0.1 * by * x.square()


def before(module, value):
    """Value of the last call."""
    last, module.last = getattr(module, "last", value), value
    return last


def closes(module, x):
    module.norm.train(ticks(module) < 4)
    return x + module.norm(x.flatten(1)[:, :4]).mean(1).view(-1, *[1] * (x.dim() - 1))


@torch.no_grad()
def moved(tensor, value, follows):
    """A teacher, which may follow."""
    return tensor.lerp_(value.detach().to(tensor), 0.3) if follows else tensor


def one(is_trained=True):
    return nn.Parameter(torch.ones(()), is_trained)


def hooked(program: Program) -> None:
    """A hook on the gradient of the first trained parameter."""
    usual = program.make

    def make(dtype=torch.float64):
        net = usual(dtype)
        first = next(p for p in net.parameters() if p.requires_grad)
        first.register_hook(lambda g: g / (1e-9 + g.norm()))
        return net

    program.make = make


def scaled(found, y, kept):
    kept.mean = 0.5 * kept.mean + 0.5 * float(found.detach())
    return found / kept.mean


def beside(found, y, kept):
    """A penalty goes backward on the way."""
    if torch.is_grad_enabled():
        every = [p for p in kept.program.net.parameters() if p.requires_grad]
        (0.5 * sum(p.square().sum() for p in every)).backward()
    return found


def reads(program: Program) -> None:
    """A penalty of activations that a part has kept."""

    def penalised(found, y, kept):
        (seen,) = (m.seen for m in kept.program.net.modules() if hasattr(m, "seen"))
        return found + seen.square().mean()

    between(lambda m, x: (setattr(m, "seen", x), x)[1])(program)
    loss_by(penalised)(program)


def channel(values):
    """A way in which a part gives a later one ``values(x)`` beside its outputs."""

    def way(program: Program) -> None:
        kept = {}
        program.parts.insert(-1, lambda: Of(lambda m, x: bent(x, kept["it"])))
        between(lambda m, x: (kept.update(it=values(m, x)), x * m.w)[1], w=one)(program)

    return way


def broadcasts(loss):
    """A way in which labels of (B,) meet outputs of (B, 1)."""

    def way(program: Program) -> None:
        last, program.y = program.parts[-1], torch.arange(SAMPLES).double().sin()
        program.parts[-1] = lambda: nn.Sequential(last(), Of(lambda m, y: y[:, :1]))
        program.form, program.loss = "whole", loss

    return way


def own_loss(f):
    """A way in which the module's own loss is ``f`` of two means."""

    def way(program: Program) -> None:
        program.form, program.y = "own loss", program.x.flatten(1)[:, :1].double().sin()
        program.given.pop("cuts", None)
        program.loss = lambda y, t: f(F.mse_loss(y[:, :1], t), F.mse_loss(y[:, -1:], -t))

    return way


def sgd(move):
    """A way whose optimiser is SGD that gives itself and all parameters to ``move`` as well."""

    class Own(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            move(self, [p for g in self.param_groups for p in g["params"] if p.grad is not None])

    return stepping(Own)


def looks_ahead(own, parameters):
    moves = ticks(own) % 4 == 0
    for p in parameters:
        slow = own.state[p].setdefault("slow", p.clone())
        if moves:
            p.copy_(slow.lerp_(p, 0.5))


def is_late(own, parameters):
    for p in parameters:
        kept = own.state[p]
        kept["step"] = kept.get("step", 0) + 1
        if kept["step"] > 4:
            p.sub_(kept.setdefault("late", torch.zeros_like(p)).lerp_(p.grad, 0.1))


class Known(torch.optim.SGD):
    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.decays = {id(p) for p in self.param_groups[0]["params"][::2]}

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.data.mul_(0.9 if id(p) in self.decays else 1)


class ByNorm(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        norm = float(self.optimizer.param_groups[0]["params"][0].detach().norm())
        return [rate / (1 + norm) for rate in self.base_lrs]


def embeds(program: Program) -> None:
    """Rows of a table are shortened in the pass that reads them."""
    program.x, width = torch.arange(SAMPLES)[:, None] % 9, (*program.y.shape, CLASSES)[1]
    program.parts[:] = [
        partial(nn.Embedding, 9, 6, max_norm=0.5), nn.Flatten, partial(nn.Linear, 6, width)
    ]  # fmt: skip


#: Ways of each kind.
KINDS = {
    "samples mixed forward": [
        between(lambda m, x: x - x.mean(0)),
        between(lambda m, x: x + 0.3 * x.flip(0)),
        between(lambda m, x: x / (1e-3 + x.norm())),
        between(lambda m, x: x * x.softmax(0)),
    ],
    "samples mixed backward": [
        between(lambda m, x: graded(m, x, lambda m, g: g / (1e-9 + g.norm()))),
        between(lambda m, x: graded(m, x, lambda m, g: g / (1e-3 + g.norm()))),
        between(lambda m, x: Backward.apply(x, lambda g: g - g.mean(0))),
    ],
    "module keeps state": [
        between(lambda m, x: bent(x, ticks(m))),
        between(lambda m, x: bent(x, before(m, float(x.detach().mean())))),
    ],
    "buffer counts": [
        between(lambda m, x: bent(x, m.taken.add_(1).clone()), taken=lambda: torch.zeros(())),
    ],
    "loss keeps state": [
        loss_by(lambda found, y, kept: found * kept.calls), loss_by(scaled),
    ],
    "norm held late": [between(closes, norm=lambda: nn.BatchNorm1d(4))],
    "frozen for some passes": [
        between(lambda m, x: bent(x, m.a.weight.requires_grad_(ticks(m) > 3).sum()), a=linear)
    ],
    "gradient of a mean": [
        between(lambda m, x: x + 100 * slope(x, lambda own: (own.tanh() * m.w).mean()), w=one),
    ],
    "teacher": [
        between(lambda m, x: bent(x, m.w + moved(m.slow, m.w, m.training and ticks(m) % 2)),
                w=one, slow=partial(one, False)),
        between(lambda m, x: bent(x, m.w + moved(m.slow, x.mean(), m.training)),
                w=one, slow=partial(one, False)),
    ],
    "parameters changed forward": [
        between(lambda m, x: bent(x, (m.w.data.mul_(0.9), m.w)[1]), w=one), embeds,
    ],
    "branch by the batch": [
        between(lambda m, x: x.tanh() if float(x.detach().mean()) > 0.05 else x),
        between(lambda m, x: x if len(x) > 5 else x.tanh()),
    ],
    "other random numbers": [
        between(lambda m, x: bent(x, random.random())),
        between(lambda m, x: bent(x, np.random.rand())),
    ],
    "hook counts micro-batches": [
        between(lambda m, x: graded(m, x, lambda m, g: g * (1 + ticks(m) % 2))),
        between(lambda m, x: graded(m, x, lambda m, g: g if len(g) > 5 else g * 0)),
    ],
    "gradient beside the loss": [
        loss_by(beside),
        hooked,
    ],
    "loss reads activations": [reads],
    "side channel": [
        channel(lambda m, x: m.w.exp()), channel(lambda m, x: x.square().mean()),
        channel(lambda m, x: 2 + x.detach().mean()),
    ],
    "loss broadcasts": [
        broadcasts(lambda y, t: F.poisson_nll_loss(y, t.abs())),
        broadcasts(lambda y, t: F.kl_div(y, t.abs())),
        broadcasts(lambda y, t: (y - t).square().mean()),
        broadcasts(lambda y, t: F.hinge_embedding_loss(y, t.sign())),
    ],
    "weights by the batch": [
        own_loss(lambda a, b: a + b * (a.detach() / b.detach())), own_loss(torch.maximum),
        own_loss(lambda a, b: a if float(a) > 0.8 else a + b),
    ],
    "mean taken twice": [
        loss_by(lambda found, y, kept: (found, len(y))),
        loss_by(lambda found, y, kept: found / len(y)),
    ],
    "norm of the batch": [
        loss_by(lambda found, y, kept: found / (1 + y.detach().std())),
        loss_by(lambda found, y, kept: found + y.square().mean(0).sqrt().sum()),
        loss_by(lambda found, y, kept: found.sqrt()),
    ],
    "optimiser counts": [
        sgd(looks_ahead),
        sgd(lambda own, ps: own.param_groups[0].update(lr=own.param_groups[0]["lr"] * 0.7)),
    ],
    "optimiser's late state": [sgd(is_late)],
    "optimiser knows parameters": [stepping(Known)],
    "optimiser mixes parameters": [
        sgd(lambda own, ps: [p.sub_(0.01 * p.grad / sum(q.grad.norm() for q in ps)) for p in ps]),
    ],
    "optimiser draws": [sgd(lambda own, ps: [p.add_(0.01 * torch.randn_like(p)) for p in ps])],
    "scheduler reads training": [stepping(torch.optim.SGD, ByNorm)],
}  # fmt: skip
