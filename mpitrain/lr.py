"""The learning rate at each step: linear scaling, gradual warm-up, then a schedule."""

import math
from typing import assert_never

from mpitrain.config import Optim, Train


def learning_rate(optim: Optim, train: Train, epoch: float) -> float:
    """The rate after ``epoch`` passes over the data (a fraction within a pass).

    The scaled rate ``k * lr``, ``k = batch_size / reference_batch``, belongs to a batch that is
    ``k`` times larger.  During warm-up the rate climbs to it from ``lr``, step by step (Goyal et
    al. 2017, sections 2.1 and 2.2); for ``k <= 1`` there is nothing to climb.  Without a
    ``reference_batch`` the rate is not scaled, and climbs from 0.
    """
    scaled = optim.lr * train.batch_size / (optim.reference_batch or train.batch_size)
    if epoch < optim.warmup_epochs:
        base = min(optim.lr, scaled) if optim.reference_batch else 0.0
        return base + (scaled - base) * epoch / optim.warmup_epochs
    match optim.schedule:
        case "constant":
            return scaled
        case "cosine":
            done = (epoch - optim.warmup_epochs) / (train.epochs - optim.warmup_epochs)
            return scaled * 0.5 * (1.0 + math.cos(math.pi * done))
        case "step":
            return scaled * optim.decay ** sum(epoch >= passed for passed in optim.milestones)
        case _:
            assert_never(optim.schedule)
