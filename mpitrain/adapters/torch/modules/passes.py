"""The backward half of a pass of a torch module."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from mpitrain.adapters.torch.arrays import as_array, as_tensors, tensors_of
from mpitrain.adapters.torch.checks.probe import Tensors, backward, one_line
from mpitrain.adapters.torch.modules.calls import Call
from mpitrain.arrays import Array, array_namespace
from mpitrain.fields import fields, joined, marks, partial, unused


class PlainPass(NamedTuple):
    """A forward pass of a module of torch's own, by its parameters, its input and its output."""

    own: Tensors
    x: torch.Tensor
    y: torch.Tensor

    def backward(
        self, dy: Array, *, meets: bool = False
    ) -> tuple[Array, dict[str, torch.Tensor | None]]:
        """As that of :class:`Pass`; the input's gradient is marked as unused if nobody asks."""
        xp, every = array_namespace(dy), {**self.own, "": self.x}
        wanted = {name: one for name, one in every.items() if one.requires_grad}
        kept = dict[str, torch.Tensor | None].fromkeys(wanted)
        if wanted and self.y.requires_grad and not unused(dy):
            by = as_tensors({"": dy}).values()
            found = torch.autograd.grad([self.y], [*wanted.values()], [*by], allow_unused=True)
            kept = dict(zip(wanted, found, strict=True))
        if (dx := kept.pop("", None)) is not None:
            return as_array(dx, xp), kept
        zeros = xp.zeros(self.x.shape, as_array(self.x, xp).dtype)
        return partial(zeros, [""] if xp is np else ()), kept


class Pass(NamedTuple):
    """A forward pass, as its backward pass needs it.

    Attributes:
        call: the call of the module.
        own: the parameters, by name.
        y: the outputs, by name.
        again: context of the backward pass, parts of which may go forward once more.
    """

    call: Call
    own: Tensors
    y: Tensors
    again: AbstractContextManager[None]

    def backward(self, dy: Array, *, meets: bool) -> tuple[Array, dict[str, torch.Tensor | None]]:
        """Gradients by the input and by the parameters, from those by the outputs.

        ``meets``: whether replicas go backward together, and through what one of them uses.  None:
        the outputs do not follow from a parameter.
        """
        xp, counts, by, left_out = array_namespace(dy), len(dy) > 0, fields(dy), unused(dy)
        if meets:
            by_all = self.call.context.replicas.sum(marks(dy), MPI.MIN)
            left_out = frozenset(name for name, is_unused in zip(by, by_all) if is_unused)
        x = self.call.x
        inputs = {name: part for name, part in x.items() if part.requires_grad}
        y = {n: part for n, part in self.y.items() if part.requires_grad and n not in left_out}
        wanted = [*inputs.values(), *self.own.values()]
        found: list[torch.Tensor | None] = [None] * len(wanted)
        if wanted and y:
            given = (
                tensors_of({name: by[name] for name in y})
                if counts
                else {name: torch.zeros_like(part) for name, part in y.items()}
            )
            try:
                with self.again:
                    found[:] = backward(list(y.values()), list(given.values()), wanted)
            except RuntimeError as error:  # all ranks learn it
                self.call.watched.say(f" cannot go backward: {one_line(error)}")
        used = {n: as_array(g, xp) for n, g in zip(inputs, found, strict=False) if g is not None}
        dx = joined(
            {
                name: used[name] if name in used else xp.zeros(part.shape, as_array(part, xp).dtype)
                for name, part in x.items()
            }
        )
        left = x.keys() - used.keys()
        if xp is not np and y and left & inputs.keys():
            self.call.watched.say(
                ": the loss does not follow from its input, so that the layers before it stay as "
                "they are, which the trainer can do on the CPU alone; leave them out, or set "
                "run.device = 'cpu'"
            )
        kept = dict(zip(self.own, found[len(inputs) :], strict=True))
        if not counts:  # a rank without samples does not use what other ranks do not use
            dx, kept = dx[:0], dict.fromkeys(kept)
        return partial(dx, left if xp is np else ()), kept
