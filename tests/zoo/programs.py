"""Programs drawn of parts: module, loss, optimiser, schedule, data and settings of a trainer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as rates

from tests.zoo.parts import PARTS, H

SAMPLES, CLASSES, LENGTH = 24, 4, 5
WEIGHT = torch.tensor([1.0, 0.5, 4.0, 0.2])


class Whole(nn.Module):
    """Parts in one module: outputs as they are, in a dictionary, or with a loss of its own."""

    def __init__(self, parts, form, loss):
        super().__init__()
        self.parts, self.form, self.loss = nn.Sequential(*parts), form, loss

    def forward(self, x, labels=None):
        y = self.parts(x)
        if self.form == "own loss":
            return {"loss": self.loss(y, labels), "y": y}
        return {"y": y, "kept": y.detach()} if self.form == "dictionary" else y


@dataclass
class Program:
    """Objects that a trainer is given, drawn anew for each run, as losses may keep something.

    Attributes:
        parts: functions that make the module's parts, of which the first and the last fit the data.
        form: "sequential", or that of a :class:`Whole`.
        schedule: function that makes a scheduler of the optimiser.
        given: other settings of the trainer.
        words: names of what was drawn.
        net: the module that was made last.
        drops: whether dropout is on.
    """

    parts: list[Callable[[], nn.Module]]
    form: str
    loss: Any
    optimizer: Any
    x: torch.Tensor
    y: torch.Tensor
    schedule: Any
    given: dict[str, Any]
    seed: int
    words: list[str]
    net: Any = None
    drops: bool = True

    def data(self, kind: torch.dtype) -> list[Any]:
        """Samples with floating-point numbers of this type."""
        x, y = (one.to(kind) if one.is_floating_point() else one for one in (self.x, self.y))
        named = self.form == "own loss"
        return [{"x": a, "labels": b} if named else (a, b) for a, b in zip(x, y)]

    def make(self, kind: torch.dtype = torch.float64) -> nn.Module:
        """A new module of this type, with the program's values."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            parts = [make() for make in self.parts]
        is_plain = self.form == "sequential"
        self.net = nn.Sequential(*parts) if is_plain else Whole(parts, self.form, self.loss)
        for part in self.net.modules():
            if hasattr(part, "p") and not self.drops and not isinstance(part.p, torch.Tensor):
                part.p = 0.0
        return self.net.to(kind)

    @property
    def loss_of(self) -> Any:
        """Loss of the module's outputs and labels, as a trainer has it."""
        if self.form == "dictionary":
            return lambda outputs, labels: self.loss(outputs["y"], labels)
        return "model" if self.form == "own loss" else self.loss

    def has(self, word: str) -> bool:
        """Whether something of this name was drawn."""
        return any(word in one for one in self.words)


def counted(y, t):
    counts = (t.cos() > 0).expand_as(y).to(y)
    return ((y - t).square() * counts).sum(), counts.sum()


#: Losses of numbers, and of classes, by name.
NUMBERS = {
    "mse": F.mse_loss,
    "l1": nn.L1Loss(),
    "huber": partial(F.huber_loss, delta=0.5),
    "own": lambda y, t: (y - t).cosh().log().mean(),
    "sum and count": counted,
    "weights": lambda y, t: ((y - t).square() * t.exp()).mean(),
    "sum": nn.MSELoss(reduction="sum"),
    "poisson": lambda y, t: F.poisson_nll_loss(y, t.abs()),
    "logits": lambda y, t: F.binary_cross_entropy_with_logits(y, (t > 0).to(y)),
    "two": lambda y, t: F.mse_loss(y, t) + 0.3 * F.l1_loss(y, t),
    "quantile": lambda y, t: torch.maximum(0.3 * (t - y), 0.7 * (y - t)).mean(),
}
SCORES = {
    "cross entropy": nn.CrossEntropyLoss(),
    "class weights": lambda y, t: F.cross_entropy(y, t, weight=WEIGHT.to(y)),
    "smoothing": nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=-100),
    "nll": lambda y, t: F.nll_loss(y.log_softmax(1), t, weight=WEIGHT.to(y)),
    "own count": lambda y, t: (F.cross_entropy(y, t, reduction="sum"), (t >= 0).sum()),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
}


class Leans(torch.optim.SGD):
    """An average of gradients, slow weights, and a number of steps, all in its state."""

    @torch.no_grad()
    def step(self, closure=None):
        every = [(p, group["lr"]) for group in self.param_groups for p in group["params"]]
        for p, rate in every:
            if p.grad is None:
                continue
            own = self.state[p]
            if not own:
                own.update(step=0, mean=torch.zeros_like(p), slow=p.clone())
            own["step"] += 1
            p.sub_(own["mean"].lerp_(p.grad, 0.2), alpha=rate)
            if own["step"] % 3 == 0:
                p.copy_(own["slow"].lerp_(p, 0.5))


#: Optimisers and schedules by name.  Rounding of gradients that are 0 stays small.
OPTIMIZERS = {
    name: partial(getattr(torch.optim, kind), **options)
    for name, kind, options in [
        ("sgd", "SGD", {"lr": 0.02}),
        ("momentum", "SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("dampened", "SGD", {"lr": 0.02, "momentum": 0.8, "dampening": 0.5}),
        ("adam", "Adam", {"lr": 3e-3, "eps": 1e-5}),
        ("adamw", "AdamW", {"lr": 3e-3, "eps": 1e-5, "amsgrad": True}),
        ("rmsprop", "RMSprop", {"lr": 1e-3, "eps": 1e-3, "centered": True}),
        ("adagrad", "Adagrad", {"lr": 0.01, "eps": 1e-4, "initial_accumulator_value": 0.1}),
        ("adadelta", "Adadelta", {"lr": 0.1, "eps": 1e-4}),
        ("nadam", "NAdam", {"lr": 3e-3, "eps": 1e-5}),
        ("radam", "RAdam", {"lr": 3e-3, "eps": 1e-5}),
        ("adamax", "Adamax", {"lr": 3e-3, "eps": 1e-4}),
        ("asgd", "ASGD", {"lr": 0.02, "t0": 3}),
    ]
} | {"leans": partial(Leans, lr=0.01)}
SCHEDULES = {
    "cosine": lambda o: rates.CosineAnnealingLR(o, 7),
    "steps": lambda o: rates.StepLR(o, 3, 0.5),
    "one cycle": lambda o: rates.OneCycleLR(o, 0.02, total_steps=20, cycle_momentum=False),
    "factor": lambda o: rates.LambdaLR(o, lambda step: 1 / (1 + step)),
    "restarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 4),
    "two": lambda o: rates.SequentialLR(
        o, [rates.LinearLR(o, 0.1, total_iters=3), rates.ExponentialLR(o, 0.9)], [3]
    ),
}


def in_groups(factory):
    """Matrices and vectors apart, at two rates."""

    def made(parameters):
        some, rest = (
            [p for p in parameters if (p.ndim > 1) is is_some] for is_some in (True, False)
        )
        rate = factory.keywords["lr"]
        groups = [{"params": some, "lr": rate}, {"params": rest, "lr": rate / 2}]
        return factory([group for group in groups if group["params"]])

    return made


def drawn(rng: Random) -> Program:
    """A right program."""
    seed = rng.randrange(1 << 30)
    draw = torch.Generator().manual_seed(seed)
    form = rng.choice(("flat", "flat", "rows", "words", "images"))
    stem, shape, size = {
        "flat": (partial(nn.Linear, 4, H), (4,), H),
        "rows": (partial(nn.Linear, 4, H), (LENGTH, 4), LENGTH * H),
        "words": (partial(nn.Embedding, 9, H, padding_idx=0), (LENGTH,), LENGTH * H),
        "images": (partial(nn.Conv2d, 2, H, 1), (2, 4, 4), 16 * H),
    }[form]
    x = torch.randn(SAMPLES, *shape, generator=draw)
    if form == "words":
        form, x = "rows", (x.abs() * 4).long().clamp(max=8)
    is_numbers = rng.random() < 0.5
    width, losses = (rng.choice((1, 3)), NUMBERS) if is_numbers else (CLASSES, SCORES)
    y = torch.randn(SAMPLES, width, generator=draw)
    if not is_numbers:
        y = y.argmax(1).where((y[:, 0] < 0.8) | (torch.arange(SAMPLES) % 3 == 0), -100)
    parts, name = rng.sample(sorted(PARTS[form]), rng.randint(1, 3)), rng.choice(sorted(losses))
    own, scheduled = rng.choice(sorted(OPTIMIZERS)), rng.choice(sorted(SCHEDULES) + ["none"] * 3)
    whole = rng.choice(("sequential", "sequential", "whole", "dictionary"))
    # The counts of a module's own loss are known too late for a backward pass that is not linear.
    may_own = name != "cross entropy" or "gradient clamped" not in parts
    if name in ("mse", "two", "cross entropy") and rng.random() < 0.4 and may_own:
        whole = "own loss"
    grouped, penalty = rng.random() < 0.3, rng.random() < 0.15
    makes = [stem, *(PARTS[form][n] for n in parts), partial(nn.Linear, size, width)]
    if form != "flat":
        makes.insert(-1, nn.Flatten)
    given = {"batch_size": rng.choice((6, 7, 8)), "micro_batches": rng.choice((1, 2, 3))}
    program = Program(
        makes, whole, losses[name], OPTIMIZERS[own], x, y, SCHEDULES.get(scheduled), given, seed,
        [whole, form, *parts, name, own, scheduled],
    )  # fmt: skip
    if grouped:
        program.optimizer = in_groups(program.optimizer)
    if penalty and whole != "own loss" and name in ("mse", "own", "quantile"):
        usual = program.loss
        program.loss = lambda y, t: (
            usual(y, t)
            + 0.05 * sum(p.square().sum() for p in program.net.parameters() if p.requires_grad)
        )
    if program.has("batch norm"):
        given["micro_batches"] = 1
    if rng.random() < 0.3:
        given[rng.choice(("clip_norm", "clip_value"))] = rng.choice((0.05, 1.0))
    if whole == "whole" and rng.random() < 0.3:
        given["cuts"] = ["parts.0"]
    if program.schedule and rng.random() < 0.2:
        given["schedule_by"] = "epoch"
    if rng.random() < 0.15:
        given["parallel"] = {"recompute": True}
    program.words += [f"groups={grouped}", f"penalty={penalty}", str(given)]
    return program
