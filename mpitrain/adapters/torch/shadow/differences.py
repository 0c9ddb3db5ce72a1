"""The first difference between plain torch and the trainer's layers, in words."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from mpitrain.adapters.torch.checks.probe import Tensors

#: How much further apart than torch and torch with inputs moved by one ulp results may be.
_TIMES = 64
_TINY = torch.finfo(torch.float64).tiny


@dataclass
class Passed:
    """Results of one side for a few samples.

    Attributes:
        loss: the loss.
        gradients: gradients by the names of the parameters; None: the loss does not depend on it.
        outputs: the module's outputs.
        narrow: type with the fewest digits that has had a part in them.
    """

    loss: float
    gradients: Mapping[str, torch.Tensor | None]
    outputs: Tensors
    narrow: torch.dtype = field(default=torch.float64)


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
        ratio = float((self.found * self.wanted).sum()) / square if square else 0.0
        rest = float((self.found - ratio * self.wanted).norm()) / max(
            float(self.found.norm()), _TINY
        )
        near, cause = Fraction(ratio).limit_denominator(16), self.cause
        if not self.found.any():
            how = "is 0, and not so in torch"
        elif rest < 1e-3 and near > 0 and near != 1 and abs(float(near) / ratio - 1) < 1e-5:
            how = f"is {near} {'times' if near.denominator == 1 else 'of'} torch's"
            if self.name and 1 in (near.numerator, near.denominator):
                cause = f"a mean was taken twice, or not at all; or {cause}"
        elif self.found.numel() == 1:
            how = f"is {float(self.found):.8g}, and {float(self.wanted):.8g} in torch"
        elif rest < 1e-3:
            how = f"is {ratio:.4g} times torch's"
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
    eps = torch.finfo(wanted.narrow).eps

    def differs(ours: torch.Tensor, own: torch.Tensor, other: torch.Tensor, most: float) -> bool:
        noise = float((other - own).abs().max())
        allowed = _TIMES * (noise + eps * most) + eps**0.5 * float(own.abs().max())
        return not float((ours - own).abs().max()) <= allowed

    every = [*_pairs(found.outputs, wanted.outputs, moved.outputs)]
    same_outputs = not any(
        ours.shape != own.shape or differs(ours, own, other, _most(own))
        for _, ours, own, other in every
    )
    loss, right, near = (
        torch.tensor(one.loss, dtype=torch.float64) for one in (found, wanted, moved)
    )
    if differs(loss, right, near, abs(wanted.loss)):
        return Difference(
            "the loss", "", loss, right,
            "it is no mean over samples with equal weights, or compares samples of a batch; return "
            "(sum, count)" if same_outputs and every else
            "the module gives samples other outputs than in one batch: it mixes samples, uses "
            "values from outside, or keeps something that changes from pass to pass",
        )  # fmt: skip
    gradients = [*_pairs(found.gradients, wanted.gradients, moved.gradients)]
    most = max((_most(own) for _, _, own, _ in gradients), default=0.0)
    for name, ours, own, other in gradients:
        if differs(ours, own, other, most):
            return Difference(
                "the gradient", name, ours, own,
                "the loss depends on it by another way than the outputs, as by a tensor that is "
                "kept elsewhere, or the backward pass mixes samples or rests on a batch's norm",
            )  # fmt: skip
    return None


def first_parameter(found: Tensors, wanted: Tensors, before: Tensors) -> Difference | None:
    """The first parameter that an update by the same gradients moves elsewhere."""
    for name, ours, own, old in _pairs(found, wanted, before):
        eps = torch.finfo(wanted[name].dtype).eps
        allowed = _TIMES * eps * _most(own) + eps**0.5 * _most(own - old)
        if not _most(ours - own) <= allowed:
            return Difference(
                "the update", name, ours - old, own - old,
                "the optimiser keeps something outside of its state, goes by more than each number "
                "by itself, mixes parameters or draws random numbers, or the scheduler reads what "
                "changes in training; leave that out, or try without parallel.zero",
            )  # fmt: skip
    return None


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
