"""Optimisers of torch over the flat pieces of the trainer."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch

from mpitrain.adapters.torch.arrays import as_tensor, on_stream_of
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.optim.groups import Group, Grouping
from mpitrain.optim.optimizers import State

#: Makes an optimiser of some parameters, as ``lambda p: torch.optim.AdamW(p, lr=3e-3)``.
Factory = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]

#: Whose new value of a number follows from that number's own past, so that shards can be updated;
#: others are tried.
_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Rprop,
)  # fmt: skip

#: What an optimiser looks at when it is made, whatever its groups say later.
_BEGINNINGS = ("initial_accumulator_value",)


class TorchOptimizer:
    """An :class:`mpitrain.optim.optimizers.Optimizer` that torch's makes the step of.

    It is made anew for each step, with a flat piece of the parameters; the arrays of its state are
    the trainer's, which shards and saves them as those of ours.

    Attributes:
        slots: names of its state's arrays.
        lr: its learning rate, which the job's schedule starts from.
        options: of a group of its parameters.
        kind: of optimiser.
        name: of the kind.
    """

    layerwise = False

    def __init__(self, like: torch.optim.Optimizer, options: Mapping[str, Any]) -> None:
        """Try it on two numbers.

        Args:
            like: the optimiser.
            options: of a group of its parameters.

        Raises:
            ConfigError: it keeps numbers that no checkpoint would have.
        """
        kind = type(like)
        self._like, self.kind = like, kind
        self.name = kind.__name__
        self.options = options
        self._step = 0
        self.lr = float(options["lr"])
        probe = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        made = self.made(probe, self.lr)
        for _ in range(2):  # some begin to keep something in their second step
            probe.grad = torch.ones_like(probe)
            made.step()
        kept = {name: value for name, value in made.state[probe].items() if value is not None}
        kept.pop("step", None)
        #: Single numbers, which follow from the steps and have an array of equal numbers.
        self._single: dict[str, torch.dtype] = {}
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and not value.dim():
                self._single[name] = value.dtype
            elif not isinstance(value, torch.Tensor) or value.shape != probe.shape:
                raise ConfigError(
                    f"optimizer: {kind.__name__} keeps {name}, which is no array of the "
                    "parameters' shape, and no checkpoint would have it; take another one"
                )
        self.slots = tuple(sorted(kept))

    def made(self, parameter: torch.nn.Parameter, rate: float) -> torch.optim.Optimizer:
        """One of a single parameter, at this rate, that has taken no step."""
        begins = {name: self.options[name] for name in _BEGINNINGS if name in self.options}
        made = self._of([{"params": [parameter]}], rate, **begins)
        made.param_groups[0].update(self.options, lr=rate)
        return made

    def _of(
        self, groups: list[dict[str, Any]], rate: float, **begins: Any
    ) -> torch.optim.Optimizer:
        """One of these groups; where a class has arguments of its own, one that is like it."""
        if self.kind.__init__.__module__.startswith("torch.optim."):
            return self.kind(groups, lr=rate, **begins)  # type: ignore[call-arg]
        made = object.__new__(self.kind)
        vars(made).update(vars(self._like), state=defaultdict(dict), param_groups=groups)
        return made

    def changed(self, options: Mapping[str, Any]) -> "TorchOptimizer":
        """The same with other values of some options."""
        found = copy(self)
        found.options = {**self.options, **options}
        return found

    def over(self, groups: Sequence["TorchOptimizer"]) -> torch.optim.Optimizer:
        """torch's optimiser of a parameter of its own for each of these groups."""
        own = [{**one.options, "params": [torch.nn.Parameter(torch.zeros(1))]} for one in groups]
        return self._of(own, self.lr)

    def prepare(self, p: Array, g: Array, state: State, step: int) -> Array:
        """The gradient as it is."""
        self._step = step
        return g

    def ratio(self, p_norm: float, g_norm: float, direction_norm: float) -> float:
        return 1.0

    def apply(self, p: Array, direction: Array, state: State, rate: Any) -> None:
        """torch's step on a piece, at this rate."""
        if p.size:
            with on_stream_of(p):
                self._apply(p, direction, state, rate)

    def _apply(self, p: Array, direction: Array, state: State, rate: Any) -> None:
        parameter = torch.nn.Parameter(as_tensor(p))
        parameter.grad = as_tensor(direction)
        made = self.made(parameter, rate)
        own = {name: as_tensor(state[name]) for name in self.slots}
        given = own | {name: own[name][0].to(kind) for name, kind in self._single.items()}
        if self._step > 1:  # in its first step it makes what it keeps, which is not always 0
            made.state[parameter].update(given, step=self._taken(parameter))
        made.step()
        for name, values in own.items():
            found = made.state[parameter][name]
            if name in self._single:
                values.fill_(found)
            elif found.data_ptr() != values.data_ptr():
                values.copy_(found)

    def _taken(self, parameter: torch.Tensor) -> torch.Tensor:
        """How many steps were taken; the fused ones read it where they compute, in float32."""
        kind, where = None, torch.device("cpu")
        if self.options.get("fused"):
            kind, where = torch.float32, parameter.device
        return torch.tensor(float(self._step - 1), dtype=kind, device=where)


def _tried(made: torch.optim.Optimizer, options: Mapping[str, Any]) -> TorchOptimizer:
    """The optimiser of a group, which updates each number by itself.

    Raises:
        ConfigError: it does not: steps on a matrix and on its pieces differ.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            found = TorchOptimizer(made, options)
            why = "" if type(made) in _ELEMENTWISE else _difference(found)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, IndexError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, ConfigError):
            raise
    if why:
        raise ConfigError(
            f"optimizer: a {type(made).__name__} does not update each number by itself ({why}), "
            "which ZeRO and flat buckets need; take one that does, as torch.optim.AdamW, or a loop "
            "of your own with mpitrain.adapters.torch.DistributedDataParallel, where any works"
        )
    return found


def _difference(own: TorchOptimizer) -> str:
    """Why steps on a matrix are not those on its pieces, each made anew; empty if they are."""
    draw, rate = torch.Generator().manual_seed(0), own.lr or 1e-3
    begin = torch.randn(3, 4, generator=draw, dtype=torch.float64)
    whole, flat = torch.nn.Parameter(begin.clone()), begin.reshape(-1).clone().numpy()
    state = {slot: flat * 0 for slot in own.slots}
    made = own.made(whole, rate)
    for step in range(1, 5):
        gradient = torch.randn(3, 4, generator=draw, dtype=torch.float64)
        whole.grad = gradient.clone()
        made.step()
        for part in (slice(5), slice(5, 12)):
            piece = {slot: array[part] for slot, array in state.items()}
            direction = own.prepare(flat[part], gradient.reshape(-1).numpy()[part], piece, step)
            own.apply(flat[part], direction.copy(), piece, rate)
    moved = whole.detach().reshape(-1)
    if torch.equal(moved, begin.reshape(-1)):
        return "it moved nothing when it was tried on a parameter of its own"
    same = torch.allclose(moved, torch.from_numpy(flat), rtol=1e-9, atol=1e-12)
    return "" if same else "steps on a matrix and on its pieces differ"


def grouped(
    factory: Factory, named: Mapping[str, torch.nn.Parameter]
) -> tuple[list[TorchOptimizer], Grouping]:
    """What a factory makes of a module's parameters: optimisers of its groups, and who has which.

    Args:
        factory: is called once, with all parameters that are trained.
        named: the parameters by their names in the trainer; empty if there is no module.

    Raises:
        ConfigError: it is no optimiser that updates each number by itself, leaves parameters out or
            brings others, or its groups keep different things.
    """
    if not callable(factory):
        raise ConfigError(
            f"optimizer: give a function that makes it of the parameters, as lambda p: "
            f"torch.optim.AdamW(p, lr=3e-3), not a {type(factory).__name__}"
        )
    given = named or {"": torch.nn.Parameter(torch.ones(1))}
    made = factory(list(given.values()))
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: the function gives a {type(made).__name__}, and an optimiser of torch is "
            "needed, as lambda p: torch.optim.AdamW(p, lr=3e-3)"
        )
    if made._optimizer_step_pre_hooks or made._optimizer_step_post_hooks:
        raise ConfigError(
            "optimizer: it has hooks on its steps, and nobody would call them, as it is made anew "
            "for each piece of the parameters; do without them"
        )
    # Of one that has taken no step, some keep where they begin.
    if any(state and float(state.get("step", 1)) > 0 for state in made.state.values()):
        raise ConfigError(
            "optimizer: it has taken steps already, and the trainer would begin without what it "
            "keeps of them; make a new one, and go on by fit(resume=True)"
        )
    names = {id(parameter): name for name, parameter in given.items()}
    found: dict[str, Group] = {}
    groups: list[TorchOptimizer] = []
    for asked in made.param_groups:
        options = {k: v for k, v in asked.items() if k != "params"}
        options |= {k: v for k, v in made.defaults.items() if k in _BEGINNINGS}
        own = _tried(made, options)
        groups.append(own)
        usual = groups[0]
        if not usual.lr or own.slots != usual.slots:
            raise ConfigError(
                "optimizer: the first group's rate must be above 0, and all groups keep the same: "
                f"{', '.join(usual.slots) or 'nothing'}, not {', '.join(own.slots) or 'nothing'}"
            )
        for parameter in asked["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"optimizer: it has a parameter of shape {tuple(parameter.shape)} that is none "
                    "of those that the function was called with; take them from its argument"
                )
            found[names[id(parameter)]] = Group(own, own.lr / usual.lr, len(groups) - 1)
    if left := [name for name in given if name not in found]:
        raise ConfigError(
            f"optimizer: it leaves out {', '.join(left[:3])}; give it all parameters, or freeze "
            "these: requires_grad_(False)"
        )
    first = Group(groups[0])  # torch refuses to make one without parameters
    return groups, (found.__getitem__ if named else lambda name: first)
