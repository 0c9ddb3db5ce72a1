"""Regions of a torch module that ranks share: each has a part, and they communicate at the edges.

A share is a copy of the module's structure in which some parts call other code.  The parameters
stay the module's own; a call of the copy is given this rank's parts of them.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mpitrain.adapters.torch.arrays import as_array, as_tensor, named_tensors
from mpitrain.group import TensorGroup, cut


class Summed(torch.autograd.Function):
    """The sum of x over ranks, or x; backward the sum of gradients, or the gradient.

    The backward pass has gradients of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: TensorGroup, xp: ModuleType, here: bool, back: bool
    ) -> torch.Tensor:
        ctx.turned = group, xp, back, here
        return as_tensor(group.sum(as_array(x.contiguous(), xp))) if here else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return Summed.apply(dy, *ctx.turned), None, None, None, None


class Region:
    """Ranks that share a module; here a single one, which communicates with nobody.

    Attributes:
        group: the ranks.
        xp: namespace of their arrays in this pass.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.xp: ModuleType = np

    def begin(self, given: Iterable[torch.Tensor]) -> None:
        """Begin a pass, of which these are parameters and inputs."""

    def end(self, outputs: Any) -> Any:
        """The outputs of a pass, which ends."""
        return outputs

    def agree(self, fault: str) -> bool:
        """Whether a rank has a fault; collective."""
        return bool(self.group.sum(np.array([bool(fault)], int))[0])

    def copy_of(self, module: nn.Module) -> nn.Module:
        """The structure of a module, with the module's own parameters, for a share here."""
        return deepcopy(module, {id(one): one for one in named_tensors(module).values()})


class Axis(NamedTuple):
    """Axis along which a parameter is cut, and the number of equal runs along it."""

    number: int
    blocks: int = 1


@dataclass(frozen=True)
class Share:
    """A rank's share of a module.

    Attributes:
        module: the module, or a copy of its structure.
        region: the ranks, and their messages.
        axes: axes of the parameters that are cut, by name.
        refusal: a text with ``{name}`` of the module and the ``{fault}`` for which it is refused.
    """

    module: nn.Module
    region: Region
    axes: Mapping[str, Axis] = field(default_factory=dict)
    refusal: str = ""

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole parameter or buffer."""
        if name not in self.axes:
            return whole
        axis, blocks = self.axes[name]
        own = self.region.group.share(whole.shape[axis] // blocks)
        found: torch.Tensor = cut(whole, axis, own, blocks)
        return found
