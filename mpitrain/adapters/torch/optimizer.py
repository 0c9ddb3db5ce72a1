"""Optimisers of torch over the flat pieces of the trainer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.optim import State

#: Makes an optimiser of some parameters, as ``lambda p: torch.optim.AdamW(p, lr=3e-3)``.
Factory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

#: Whose new value of a number follows from that number's own past, so that shards can be updated.
_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Rprop,
)  # fmt: skip


class TorchOptimizer:
    """An :class:`mpitrain.optim.Optimizer` that torch's makes the step of.

    The function that makes it is called anew for each step, with a flat piece of the parameters;
    the arrays of its state are the trainer's, which shards and saves them as those of ours.

    Attributes:
        slots: names of its state's arrays.
        lr: its learning rate, which the job's schedule starts from.
    """

    layerwise = False

    def __init__(self, factory: Factory) -> None:
        """Try it on two numbers.

        Raises:
            ConfigError: it is none that updates each number by itself, has several groups of
                parameters, or keeps numbers that no checkpoint would have.
        """
        self._factory = factory
        self._step = 0
        probe = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        made = self._made(probe)
        self.lr = float(made.param_groups[0]["lr"])
        for _ in range(2):  # some begin to keep something in their second step
            probe.grad = torch.ones_like(probe)
            made.step()
        kept = {name: value for name, value in made.state[probe].items() if value is not None}
        kept.pop("step", None)
        for name, value in kept.items():
            if not isinstance(value, torch.Tensor) or value.shape != probe.shape:
                raise ConfigError(
                    f"optimizer: {type(made).__name__} keeps {name}, which is no array of the "
                    "parameters' shape, and no checkpoint would have it; take another one"
                )
        self.slots = tuple(sorted(kept))

    def _made(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        made = self._factory([parameter])
        if type(made) not in _ELEMENTWISE:
            known = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
            raise ConfigError(
                f"optimizer: a {type(made).__name__} is not known to update each number by itself, "
                f"which ZeRO and flat buckets need; there are {known}"
            )
        if len(made.param_groups) != 1:
            raise ConfigError(
                "optimizer: several groups of parameters are not supported; give one group"
            )
        return made

    def prepare(self, p: Array, g: Array, state: State, step: int) -> Array:
        """The gradient as it is."""
        self._step = step
        return g

    def ratio(self, p_norm: float, g_norm: float, direction_norm: float) -> float:
        return 1.0

    def apply(self, p: Array, direction: Array, state: State, rate: Any) -> None:
        """torch's step on a piece, at this rate."""
        if not p.size:
            return
        parameter = torch.nn.Parameter(torch.from_numpy(p))
        parameter.grad = torch.from_numpy(direction)
        made = self._made(parameter)
        made.param_groups[0]["lr"] = rate
        own = {name: torch.from_numpy(state[name]) for name in self.slots}
        if self._step > 1:  # in its first step it makes what it keeps, which is not always 0
            made.state[parameter].update(own, step=torch.tensor(float(self._step - 1)))
        made.step()
        for name, values in own.items():
            found = made.state[parameter][name]
            if found.data_ptr() != values.data_ptr():
                values.copy_(found)
