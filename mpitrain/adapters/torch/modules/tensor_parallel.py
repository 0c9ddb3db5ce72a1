"""Tensor parallelism within a torch module: each rank has columns or rows of its matrices.

A product ``x A B`` is cut as ``sum_r (x A_r) B_r`` (Megatron, Shoeybi et al. 2019), here in the
module's own code: a copy of its structure sums gradients before matrices whose columns are shared,
and results behind those whose rows are.  Code between the two works on a part of the features or of
the heads; parameters that no map names are whole on each rank.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from mpitrain.adapters.torch.modules.regions import Axis, Region, Share, Summed
from mpitrain.adapters.torch.modules.splits import COLUMNS, NUMBER, Plan, Split
from mpitrain.group import TensorGroup

_REFUSAL = (
    "parallel.tensor: {name} cannot be shared by its map of names ({fault}); give splits= in which "
    "'rows' follow 'columns' with nothing but heads and single features between, 'columns of 3' "
    "for queries, keys and values in one matrix, and 'number' for sizes that the code reads, or "
    "leave parallel.tensor out"
)


class TensorRegion(Region):
    """Entries before matrices whose columns are shared, and exits behind those of shared rows."""

    def __init__(self, group: TensorGroup) -> None:
        super().__init__(group)
        self._entered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, given: Iterable[torch.Tensor]) -> None:
        self._entered.clear()

    def end(self, outputs: Any) -> Any:
        self._entered.clear()
        return outputs

    def enter(self, part: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The input of a matrix whose columns are shared; several matrices may have one input."""
        x, *others = given
        if id(x) not in self._entered:
            self._entered[id(x)] = x, Summed.apply(x, self.group, self.xp, False, True)
        return self._entered[id(x)][1], *others

    def leave(self, part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The result of a matrix whose rows are shared; the bias is added once."""
        weight, bias = cast(Any, part.weight), cast(Any, part.bias)
        term = F.linear(x, weight) if isinstance(part, nn.Linear) else x @ weight
        found: torch.Tensor = Summed.apply(term, self.group, self.xp, True, False)
        self._entered.clear()
        return found if bias is None else found + bias


def share(module: nn.Module, own: Plan, group: TensorGroup) -> Share:
    """A rank's share of a module, or of a part of one that has what the plan names, or not.

    Raises:
        ValueError: the ranks cannot share something equally; the text follows the module's name.
    """
    ranks = group.size
    for name, heads in own.heads.items():
        if heads % ranks:
            raise ValueError(f"has {name} = {heads}, which {ranks} ranks cannot share equally")
    region = TensorRegion(group)
    copied = region.copy_of(module)
    parts = dict(copied.named_modules())
    axes: dict[int, Axis] = {}
    for name, split in own.splits.items():
        if split.kind == NUMBER:
            owner, _, attribute = name.rpartition(".")
            if owner in parts:
                whole = getattr(parts[owner], attribute)
                setattr(parts[owner], attribute, _shared(whole, 1, ranks, name))
        elif (part := parts.get(name)) is not None and part._parameters.get("weight") is not None:
            axes |= _cut_matrix(name, part, split, region)
    named = {name: axes[id(p)] for name, p in copied.named_parameters() if id(p) in axes}
    return Share(copied, region, named, refusal=_REFUSAL)


def _cut_matrix(name: str, part: nn.Module, split: Split, region: TensorRegion) -> dict[int, Axis]:
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
    size = _shared(weight.shape[axis.number], split.blocks, region.group.size, name)
    found = {id(weight): axis}
    if "forward" in vars(part):  # an earlier part of a pipeline has called it
        return found
    if not by_columns:
        part.forward = partial(region.leave, part)
        return found
    part.register_forward_pre_hook(region.enter)
    setattr(part, "out_features" if is_turned else "nf", size)
    return found if bias is None else found | {id(bias): Axis(0, split.blocks)}


def _shared(size: int, blocks: int, ranks: int, name: str) -> int:
    """A rank's part of a size of so many equal blocks."""
    if size % (blocks * ranks):
        each = f"each of {blocks} parts of the {size}" if blocks > 1 else f"the {size}"
        raise ValueError(f"has {name}, and {ranks} ranks cannot share {each} of it equally")
    return size // ranks
