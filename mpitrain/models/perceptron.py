"""Linear layers with ReLU between them."""

import math
from collections.abc import Sequence
from itertools import pairwise

from mpitrain import nn
from mpitrain.group import TensorGroup
from mpitrain.parallel.tensor_parallel import Enter, Leave


def after_flatten(widths: Sequence[int]) -> dict[str, nn.Layer]:
    """Linear layers between these widths; the first one flattens its input."""
    found: dict[str, nn.Layer] = {}
    for index, (before, after) in enumerate(pairwise(widths)):
        first: dict[str, nn.Layer] = {"relu": nn.ReLU()} if index else {"flatten": nn.Flatten()}
        found[f"linear{index}"] = nn.Chain({**first, "linear": nn.Linear(before, after)})
    return found


def layers(
    shape: nn.Shape, hidden: tuple[int, ...], classes: int, group: TensorGroup
) -> dict[str, nn.Layer]:
    """A layer for each width.

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
        found[f"layer{index}"] = nn.Chain(parts)
    return found
