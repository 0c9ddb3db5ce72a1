"""The first difference between plain torch and the trainer's layers, in words."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch

from mpitrain.adapters.torch.checks.probe import Tensors

#: How much further apart than torch and torch with inputs moved by one ulp results may be; units in
#: the last place by which one rounding of the narrowest type, or of an update, may move a number.
_TIMES, _FEW = 64, 4
_TINY = torch.finfo(torch.float64).tiny
#: Likely causes.
_IS_NO_MEAN = (
    "it is no mean over samples with equal weights, or compares samples of a batch; return (sum, "
    "count)"
)
_MIXES = (
    "the module gives samples other outputs than in one batch: it mixes samples (which a loop of "
    "your own may, as examples/pytorch/contrastive.py), uses values from outside, or keeps "
    "something that changes from pass to pass"
)
_GRADIENT = (
    "the loss depends on it by another way than the outputs, as by a tensor that is kept "
    "elsewhere, or the backward pass mixes samples, rests on a batch's norm, or is not linear "
    "where the counts of the loss follow from outputs"
)
_STATE = "the module changes it more than once in a step, or not by this batch alone"
_UPDATE = (
    "the optimiser keeps something outside of its state, goes by more than each number by itself, "
    "mixes parameters or draws random numbers, or the scheduler reads what changes in training; "
    "leave that out, or try without parallel.zero"
)


@dataclass
class Passed:
    """Results of one side for a few samples.

    Attributes:
        loss: the loss.
        gradients: gradients by the names of the parameters; None: the loss does not depend on it.
        outputs: the module's outputs.
        state: buffers and constants that change in training, by name, after the pass.
        apart: results in a test of one sample and the others, of all together, and of all with
            inputs that are moved by one ulp, where samples are kept together in training.
        narrow: type with the fewest digits that has had a part in them.
    """

    loss: float
    gradients: Mapping[str, torch.Tensor | None]
    outputs: Tensors
    state: Tensors
    apart: Sequence["Passed"] = ()
    narrow: torch.dtype = torch.float64


class Difference(NamedTuple):
    """Numbers that are not torch's.

    Attributes:
        what: kind of the numbers, as "the gradient".
        name: name of the parameter; empty for the loss.
        found, wanted: ours and torch's, of one shape.
        cause: the likely cause.
    """

    what: str
    name: str
    found: torch.Tensor
    wanted: torch.Tensor
    cause: str

    def told(self, name: str) -> str:
        """The difference in words, with the parameter's ``name`` in the module."""
        square = float((self.wanted * self.wanted).sum())
        ratio = float((self.found * self.wanted).sum()) / max(square, _TINY)
        near = Fraction(ratio if isfinite(ratio) else 1).limit_denominator(16)
        rest = float((self.found - float(near) * self.wanted).norm())
        cause = self.cause
        if not self.found.any():
            how = "is 0, and not so in torch"
        elif not self.wanted.any():
            how = "is 0 in torch, and not so here"
        elif near > 0 and near != 1 and rest < 1e-5 * float(self.found.norm()):
            how = f"is {near} {'times' if near.denominator == 1 else 'of'} torch's"
            if self.name and 1 in (near.numerator, near.denominator):
                cause = f"a mean was taken twice, or not at all; or {cause}"
        elif self.found.numel() == 1:
            how = f"is {float(self.found):.8g}, and {float(self.wanted):.8g} in torch"
        else:
            far = float((self.found - self.wanted).norm()) / max(square**0.5, _TINY)
            how = f"is not torch's, by {far:.2g} of its norm"
        return f"{self.what}{name and f' of {name}'} {how}: {cause}"


def first(found: Passed, wanted: Passed, moved: Passed) -> Difference | None:
    """The first difference beyond rounding, if there is one.

    Args:
        found: results of the trainer's layers.
        wanted: results of plain torch.
        moved: its results with inputs and parameters that are moved by one ulp.
    """
    kinds = [one.dtype for one in wanted.gradients.values() if one is not None]
    eps = torch.finfo(kinds[0] if kinds else torch.float64).eps
    differ = partial(_differ, eps=eps, narrow=torch.finfo(wanted.narrow).eps)
    outputs = [*_pairs(found.outputs, wanted.outputs, moved.outputs)]
    is_mean = outputs and not any(
        ours.shape != own.shape or differ(ours, own, other, _most(own))
        for _, ours, own, other in outputs
    )
    loss = (torch.tensor(one.loss, dtype=torch.float64) for one in (found, wanted, moved))
    gradients = [*_pairs(found.gradients, wanted.gradients, moved.gradients)]
    most = max((_most(own) for _, _, own, _ in gradients), default=0.0)
    every: list[tuple[str, Iterable[Any], str]] = [
        ("the loss", [("", *loss)], _IS_NO_MEAN if is_mean else _MIXES),
        ("the gradient", gradients, _GRADIENT),
        ("the new value", _pairs(found.state, wanted.state, moved.state), _STATE),
    ]
    for what, pairs, cause in every:
        for name, ours, own, other in pairs:
            if differ(ours, own, other, most if pairs is gradients else _most(own)):
                return Difference(what, name, ours, own, cause)
    if not found.apart or not isfinite(found.apart[1].loss):
        return None
    return first(*(replace(one, narrow=wanted.narrow) for one in found.apart))


def first_parameter(found: Tensors, wanted: Tensors, before: Tensors) -> Difference | None:
    """The first parameter that an update by the same gradients moves elsewhere.

    Both sides begin with the same numbers, so that each knows its own rounding.
    """
    for name, ours, own, old in _pairs(found, wanted, before):
        by, right, eps = ours - old, own - old, torch.finfo(wanted[name].dtype).eps
        far = (ours - own).abs() - _FEW * eps * torch.maximum(own.abs(), old.abs())
        if not float(far.max()) <= eps**0.5 * _most(right):
            return Difference("the update", name, by, right, _UPDATE)
    return None


def _differ(
    ours: torch.Tensor,
    own: torch.Tensor,
    other: torch.Tensor,
    most: float,
    eps: float,
    narrow: float,
) -> bool:
    """Whether ours are not torch's own.

    Its ``other`` numbers and the largest one, ``most``, say what rounding by ``eps`` does; nothing
    but ``most`` what it does in a ``narrow`` type, in which others would be the same.
    """
    noise = _most((other - own).nan_to_num())
    rounding = _TIMES * (noise + eps * most) + _FEW * narrow * most
    return not _most(ours - own) <= rounding + narrow**0.5 * _most(own)


def nudged(values: torch.Tensor) -> torch.Tensor:
    """Numbers moved by one unit in the last place, but for whole ones, as indices and masks."""
    if not values.is_floating_point():
        return values
    near = torch.nextafter(values, torch.full_like(values, torch.inf))
    return torch.where(values == values.round(), values, near)


def _pairs(*several: Mapping[str, torch.Tensor | None]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Tensors of the same name in float64, where one of them has any; None is 0."""
    for name in several[1]:
        own = [other.get(name) for other in several]
        like = next((part for part in own if part is not None), None)
        if like is not None and like.numel() and name in several[0]:
            none = torch.zeros(like.shape, dtype=torch.float64)
            a, b, c = (none if part is None else part.double().nan_to_num() for part in own)
            yield name, a, b, c


def _most(values: torch.Tensor) -> float:
    return float(values.abs().max())
