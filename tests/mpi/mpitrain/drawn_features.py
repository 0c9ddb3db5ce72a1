"""Drawn programs: a model, its data, an optimiser and what a loop does, in a drawn layout."""

from random import Random

from tests.mpi.mpitrain import test_collate, test_counted, test_unused
from tests.mpi.mpitrain.fits import OPTIMIZERS, SEVERAL, WHOLE, Turns, Waves, net, regular
from tests.mpi.mpitrain.test_random import KINDS, around
from tests.zoo.parts import Of
from tests.zoo.programs import SCHEDULES

import torch  # isort: skip
from torch.optim import lr_scheduler  # isort: skip

BATCH, STEPS = 12, 10  # of two epochs


#: Schedules of groups of parameters; a factor begins at 0.
BY_GROUPS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda s: s / 10, *[lambda s: 0.9**s] * 2]),
    "StepLR": SCHEDULES["steps"],
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7, 1e-4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [6e-3, 2e-3, 1e-4], total_steps=STEPS),
    "SequentialLR": SCHEDULES["two"],
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.3, patience=0),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
}
CASES = {name: (OPTIMIZERS["groups"], schedule) for name, schedule in BY_GROUPS.items()} | {
    "Adafactor": (lambda p: torch.optim.Adafactor(p, lr=0.05, eps=(1e-8, 1e-3)), None),
    "momentum": (OPTIMIZERS["SGD"], lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=STEPS)),
    "CyclicLR": (OPTIMIZERS["SGD"], lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.05, step_size_up=2)),
}


def flat(x):
    """A function that takes no empty batch, as most modules."""
    return x.view(x.size(0), -1)


def of_rows(norm):
    parts = {"enter": torch.nn.Linear(6, 16), "leave": torch.nn.Linear(16, 1), "norm": norm}
    drop = torch.nn.Dropout(0.1)
    return Of(lambda m, x: m.leave(flat(m.drop(m.norm(m.enter(flat(x)))))), **parts, drop=drop)


def of_images():
    """Batch norm of channels, and a ``view`` of what comes out of it."""
    # A bias before a norm has a gradient of rounding, which Adam would make large.
    parts = {"enter": torch.nn.Conv2d(1, 4, 2, bias=False), "norm": torch.nn.BatchNorm2d(4)}
    of = lambda m, x: m.leave(flat(torch.relu(m.norm(m.enter(x.view(-1, 1, 2, 3))))))  # noqa: E731
    return Of(of, **parts, leave=torch.nn.Linear(8, 1))


def before_others(first):
    """The module, and parts behind it for other stages."""
    return lambda: torch.nn.Sequential(first(), *(torch.nn.Linear(1, 1) for _ in range(4)))


def counted(loss) -> dict[str, object]:
    """A mean over what counts, which some ranks may not have."""
    data = [test_counted.Drawn(seed, masked=loss is test_counted.masked) for seed in (1, 9)]
    given = {"model": lambda: net(4).double(), "loss": loss, "metrics": None}
    return given | {"train_data": data[0], "test_data": data[1]}


def unused() -> dict[str, object]:
    """Parameters that the loss does not follow from."""
    data = {"train_data": test_unused.Turns(50), "test_data": test_unused.Turns(30, 2)}
    return test_unused.given(**test_unused.CUT, **data)


def model(rng: Random) -> tuple[dict[str, object], int, bool]:
    """Keys of a model with its data, its parts, and whether it has batch norm."""
    kinds = [kind for kind in KINDS if rng.random() < 0.4]
    return rng.choice(
        [
            ({"model": net}, 5, False),
            ({"model": regular}, 6, True),
            (WHOLE, 4, False),
            (SEVERAL, 4, False),
            ({"model": lambda: around(*kinds)}, 2 + len(kinds), False),
            ({"model": lambda: around(*kinds)}, 2 + len(kinds), False),
            ({"model": before_others(lambda: of_rows(torch.nn.Identity()))}, 5, False),
            ({"model": before_others(lambda: of_rows(torch.nn.BatchNorm1d(16)))}, 5, True),
            ({"model": before_others(of_images)}, 5, True),
            (counted(rng.choice([*test_counted.LOSSES.values()])), 5, False),
            (test_collate.given(), 3, False),
            (unused(), 4, False),
        ]
    )


def job(rng: Random) -> tuple[dict[str, object], int, bool]:
    """Keys of a program, its parts, and whether it has batch norm.

    The last batch of an epoch has two samples, or one, and the test has three: ranks have none.
    """
    given, parts, has_norm = model(rng)
    given = given | {"batch_size": BATCH, "epochs": 2}
    if hasattr(given.get("train_data"), "batch_sampler"):
        del given["batch_size"]  # a loader has its own
    if "train_data" not in given:
        count = 50 if has_norm else 49
        data = rng.choice((Waves, Waves, Turns))
        given |= {"train_data": data(count, 1), "test_data": data(rng.choice((3, 30)), 2)}
        given["workers"] = rng.choice((0, 1, 2) if data is Waves else (0, 1))
    how = rng.choice(["adam", *OPTIMIZERS, *CASES])
    if has_norm and how == "Rprop":
        how = "adam"  # a bias before a norm has a gradient of rounding, whose sign Rprop takes
    if how in CASES:
        given["optimizer"], given["schedule"] = CASES[how]
    elif how in OPTIMIZERS:
        given["optimizer"] = OPTIMIZERS[how]
    given |= rng.choice(({}, {}, {"clip_value": 0.05}, {"clip_norm": 0.5}))
    given["shadow"] = rng.choice((0, 8))
    return given, parts, has_norm


def layout(rng: Random, parts: int, has_norm: bool, ranks: int) -> dict[str, object]:
    """Keys of a layout for so many parts; norms see one micro-batch."""
    pipe = rng.choice([n for n in (1, 2, 3, 4) if ranks % n == 0 and n <= parts])
    schedules = ["1f1b", "gpipe", "zero_bubble"] + ["zb_v"] * (2 * pipe <= parts)
    keys = {"pipe": pipe, "schedule": rng.choice(schedules) if pipe > 1 else "1f1b"}
    keys["zero"] = rng.choice((0, 1, 2, 3))
    keys["recompute"], keys["overlap"] = rng.random() < 0.3, rng.random() < 0.7
    keys["bucket_bytes"] = rng.choice((256, 2**20))
    return {"parallel": keys, "micro_batches": 1 if has_norm else rng.choice((1, 2, 3))}
