"""Linear layers with ReLU between them."""

import math
from itertools import pairwise

from mpitrain import nn
from mpitrain.group import TensorGroup
from mpitrain.parallel.tensor_parallel import Enter, Leave


def layers(
    shape: nn.Shape,
    hidden: tuple[int, ...],
    classes: int,
    group: TensorGroup,
    name: str = "layer",
) -> dict[str, nn.Layer]:
    """A layer for each width, under ``name`` and its number; the first one flattens its input.

    Tensor ranks split the outputs of every first layer and the inputs of every second, so that two
    layers need one sum over the ranks forward and one backward.
    """
    found: dict[str, nn.Layer] = {}
    pairs = list(pairwise([math.prod(shape), *hidden, classes]))
    for index, (before, after) in enumerate(pairs):
        parts: dict[str, nn.Layer] = {"relu": nn.ReLU()} if index else {"flatten": nn.Flatten()}
        if index % 2:
            parts |= {
                "linear": nn.Linear(before, after, bias=False, split="inputs"),
                "leave": Leave(group),
                "bias": nn.Bias(after),
            }
        elif index + 1 < len(pairs):
            parts |= {"enter": Enter(group), "linear": nn.Linear(before, after, split="outputs")}
        else:
            parts |= {"linear": nn.Linear(before, after)}
        found[f"{name}{index}"] = nn.Chain(parts)
    return found
