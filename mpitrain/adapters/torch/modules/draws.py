"""Places in a torch module where it draws random numbers, and whose numbers they are."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from mpitrain.arrays import Shape

_CALL = nn.Module._call_impl.__code__


class Where(NamedTuple):
    """Where the numbers of each sample lie in a drawn tensor.

    Attributes:
        shape: shape of the numbers of one sample.
        axis: axis along which the samples lie; None: all samples share the numbers.
        together: whether the several numbers that a sample has along the axis lie together, as
            heads of attention do, rather than those of all samples in turn.
    """

    shape: Shape
    axis: int | None = None
    together: bool = True

    def of(self, samples: int) -> Shape:
        """Shape of the numbers of so many samples."""
        if self.axis is None:
            return self.shape
        before, behind = self.shape[: self.axis], self.shape[self.axis + 1 :]
        return (*before, self.shape[self.axis] * samples, *behind)


class DrawPlace(NamedTuple):
    """A place in a module where numbers are drawn.

    Attributes:
        training: whether the module is in training mode.
        inputs: shapes of the inputs of one sample.
        name: name of the innermost module.
        turn: number of the draw within that module.
    """

    training: bool
    inputs: tuple[Shape, ...]
    name: str
    turn: int


@dataclass
class Draws:
    """Places in a module where it draws random numbers.

    Attributes:
        module: the module.
        where: where the numbers of samples lie, by place.
        plain: whether kernels are left out that draw numbers inside.
        part: number of this rank among tensor ranks.
        cut: where tensor ranks have each a part of a sample's numbers: the axis of ``Where.shape``,
            or None where all have the same, by mode, module and turn; None: no ranks share them.
    """

    module: nn.Module
    where: dict[DrawPlace, Where] = field(default_factory=dict)
    plain: bool = False
    part: int = 0
    cut: dict[tuple[bool, str, int], int | None] | None = None

    def __post_init__(self) -> None:
        self._names = {id(part): name for name, part in self.module.named_modules()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """A copy goes by the parts of its own module."""
        vars(self).update(state)
        self.__post_init__()

    def innermost(self) -> str:
        """Name of the innermost module that is being called."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL:
                found = self._names.get(id(frame.f_locals["self"]))
                if found is not None:
                    return found
            frame = frame.f_back
        return ""

    def is_recurrent(self, name: str) -> bool:
        """Whether the module of this name is an LSTM or its like."""
        return isinstance(self.module.get_submodule(name), nn.RNNBase)

    def settle(self, two: Mapping[DrawPlace, Shape], three: Mapping[DrawPlace, Shape]) -> str:
        """Find where samples lie, from the shapes drawn for 2 and for 3 samples; gives a fault."""
        for place in two.keys() & three.keys() - self.where.keys():
            found = _where(two[place], three[place])
            if found is None:
                return (
                    f"{place.name or 'it'} draws random numbers of the shape {two[place]} for 2 "
                    f"samples and {three[place]} for 3, of which no axis counts the samples"
                )
            self.where[place] = found
        return ""

    def cut_as(self, whole: "Draws", ranks: int) -> str:
        """Find the parts of a sample's numbers that this rank has; gives a fault.

        Args:
            whole: draws of the module that no ranks share, at the same places.
            ranks: number of ranks that share this one.
        """
        self.cut = self.cut or {}
        for place, own in self.where.items():
            other = whole.where.get(place)
            if other is None or len(other.shape) != len(own.shape):
                return f"{place.name or 'it'} draws random numbers on tensor ranks alone"
            pairs = list(zip(own.shape, other.shape, strict=True))
            axes = [axis for axis, (here, there) in enumerate(pairs) if here != there]
            if len(axes) > 1 or any(pairs[axis][0] * ranks != pairs[axis][1] for axis in axes):
                return (
                    f"{place.name or 'it'} draws random numbers of the shape {own.shape} where one "
                    f"process draws {other.shape}"
                )
            self.cut[place.training, place.name, place.turn] = axes[0] if axes else None
        return ""

    def first(self, place: DrawPlace, shape: Shape) -> Shape | None:
        """Place in a sample's numbers of the first that this rank draws; None: not known."""
        found = [0] * len(shape)
        if self.cut is None:
            return tuple(found)
        key = place.training, place.name, place.turn
        if key not in self.cut:
            return None
        if (axis := self.cut[key]) is not None:
            found[axis] = self.part * shape[axis]
        return tuple(found)

    def has_several(self, place: DrawPlace) -> bool:
        """Whether a sample has several numbers along the axis of the samples at a place."""
        own = self.where.get(place)
        return own is not None and own.axis is not None and own.shape[own.axis] > 1

    def lay(self, places: Iterable[DrawPlace], *, together: bool) -> None:
        """Take the several numbers of a sample along an axis to lie so at these places."""
        self.where |= {place: self.where[place]._replace(together=together) for place in places}


def _where(two: Shape, three: Shape) -> Where | None:
    """Where samples lie in a tensor of these shapes for 2 and for 3 samples; None: nowhere."""
    if len(two) != len(three):
        return None
    grows = [axis for axis, sizes in enumerate(zip(two, three, strict=True)) if len({*sizes}) > 1]
    if not grows:
        return Where(two)
    own = two[grows[0]] // 2
    found = Where((*two[: grows[0]], own, *two[grows[0] + 1 :]), grows[0])
    return found if (found.of(2), found.of(3)) == (two, three) else None


@cache
def may_draw(operator: Any) -> bool:
    """Whether an operator may draw random numbers, itself or in what it consists of."""
    found: bool = torch.Tag.nondeterministic_seeded in operator.tags
    return found or is_composite(operator)


def is_composite(operator: Any) -> bool:
    """Whether torch's own kernel of an operator consists of others for every device."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
    return found
