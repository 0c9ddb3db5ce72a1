"""Tensor parallelism within a torch module: each rank has columns or rows of its matrices.

A product ``x A B`` is cut as ``sum_r (x A_r) B_r`` (Megatron, Shoeybi et al. 2019), here in the
module's own code: a copy of its structure sums gradients before matrices whose columns are shared,
and results behind those whose rows are.  Code between the two works on a part of the features or of
the heads; parameters that no map names are whole on each rank.

A share is a copy of the module's structure in which some parts call other code.  The parameters
stay the module's own; a call of the copy is given this rank's parts of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from mpitrain.adapters.torch.arrays import as_array, as_tensor, copied, named_tensors
from mpitrain.adapters.torch.modules.splits import COLUMNS, NUMBER, Plan, Split
from mpitrain.group import TensorGroup, cut

#: A text with ``{name}`` of a module and the ``{fault}`` for which it is refused.
REFUSAL = (
    "parallel.tensor: {name} cannot be shared by its map of names ({fault}); give splits= in which "
    "'rows' follow 'columns' with nothing but heads and single features between, 'columns of 3' "
    "for queries, keys and values in one matrix, and 'number' for sizes that the code reads, or "
    "leave parallel.tensor out"
)


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
    """Entries before matrices whose columns are shared, and exits behind those of shared rows.

    Attributes:
        group: the ranks that share a module; a single one communicates with nobody.
        xp: namespace of their arrays in this pass.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.xp: ModuleType = np
        self._entered: dict[tuple[int, bool], tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        """Forget the inputs of matrices, before and after a pass."""
        self._entered.clear()

    def agree(self, fault: bool) -> bool:
        """Whether a rank has a fault; collective, of another kind than those of a pass."""
        return bool(self.group.all(np.array(fault)).any())

    def enter(self, part: nn.Module, given: tuple[Any, ...], named: Any) -> Any:
        """The input of a matrix whose columns are shared; several matrices may have one input."""
        x, *others = given or named.values()
        key = id(x), torch.is_grad_enabled()
        if key not in self._entered:
            self._entered[key] = x, Summed.apply(x, self.group, self.xp, False, True)
        return (self._entered[key][1], *others), {}

    def leave(self, part: nn.Module, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """The result of a matrix whose rows are shared; the bias is added once."""
        (x,) = given or named.values()
        weight, bias = cast(Any, part.weight), cast(Any, part.bias)
        term = F.linear(x, weight) if isinstance(part, nn.Linear) else x @ weight
        found: torch.Tensor = Summed.apply(term, self.group, self.xp, True, False)
        self._entered.clear()
        return found if bias is None else found + bias


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
    """

    module: nn.Module
    region: Region
    axes: Mapping[str, Axis] = field(default_factory=dict)

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole parameter or buffer."""
        if name not in self.axes:
            return whole
        axis, blocks = self.axes[name]
        own = self.region.group.share(whole.shape[axis] // blocks)
        found: torch.Tensor = cut(whole, axis, own, blocks)
        return found


def share(module: nn.Module, own: Plan, group: TensorGroup) -> Share:
    """A rank's share of a module, or of a part of one that has what the plan names, or not.

    Raises:
        ValueError: the ranks cannot share something equally; the text follows the module's name.
    """
    ranks = group.size
    for name, heads in own.heads.items():
        if heads % ranks:
            raise ValueError(f"has {name} = {heads}, which {ranks} ranks cannot share equally")
    region = Region(group)
    copy = copied(module, {id(one): one for one in named_tensors(module).values()})
    parts = dict(copy.named_modules(remove_duplicate=False))
    axes: dict[int, Axis] = {}
    shared: dict[tuple[int, str], tuple[str, Split]] = {}
    for name, split in own.splits.items():
        owner, _, attribute = name.rpartition(".") if split.kind == NUMBER else (name, "", "")
        if (part := parts.get(owner)) is None:
            continue
        first, before = shared.setdefault((id(part), attribute), (name, split))
        if before != split:
            raise ValueError(f"has {name}, which is {first} by another name, and both are shared")
        if first != name:
            continue
        if split.kind == NUMBER:
            setattr(part, attribute, share_of(getattr(part, attribute), 1, ranks, name))
        elif part._parameters.get("weight") is not None:  # else another part of a pipeline has it
            axes |= _cut_matrix(name, part, split, region)
    named = {name: axes[id(p)] for name, p in copy.named_parameters() if id(p) in axes}
    return Share(copy, region, named)


def _cut_matrix(name: str, part: nn.Module, split: Split, region: Region) -> dict[int, Axis]:
    """Axes of the parameters of a matrix, by identity; the module communicates from now on."""
    is_turned = isinstance(part, nn.Linear)  # its weight is (outputs, inputs)
    if not is_turned and not (type(part).__name__ == "Conv1D" and hasattr(part, "nf")):
        raise ValueError(
            f"has {name}, a {type(part).__name__}, and tensor ranks share the torch.nn.Linear and "
            "Conv1D of transformers alone; leave it out of splits"
        )
    by_columns = split.kind == COLUMNS
    axis = Axis(0 if by_columns == is_turned else 1, split.blocks)
    weight, bias = part._parameters["weight"], part._parameters.get("bias")
    assert weight is not None
    size = share_of(weight.shape[axis.number], split.blocks, region.group.size, name)
    found = {id(weight): axis}
    if "forward" in vars(part):  # an earlier part of a pipeline has called it
        return found
    if not by_columns:
        part.forward = partial(region.leave, part)
        return found
    part.register_forward_pre_hook(region.enter, with_kwargs=True)
    setattr(part, "out_features" if is_turned else "nf", size)
    return found if bias is None else found | {id(bias): Axis(0, split.blocks)}


def share_of(size: int, blocks: int, ranks: int, name: str) -> int:
    """A rank's part of a size of so many equal blocks.

    Raises:
        ValueError: the ranks cannot share it equally.
    """
    if size % (blocks * ranks):
        each = f"each of {blocks} parts of the {size}" if blocks > 1 else f"the {size}"
        raise ValueError(f"has {name}, and {ranks} ranks cannot share {each} of it equally")
    return size // ranks
