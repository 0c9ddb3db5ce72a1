"""Optimisers of torch over the flat pieces of the trainer."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch

from mpitrain.adapters.torch.arrays import as_tensor, on_stream_of
from mpitrain.adapters.torch.checks.probe import one_line
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.optim.groups import Grouping, ParameterGroup
from mpitrain.optim.optimizers import Optimizer, State

#: Makes an optimiser of some parameters, as ``lambda p: torch.optim.AdamW(p, lr=3e-3)``.
Factory = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]

#: Options that an optimiser reads only when it is made.
_BEGINNINGS = ("initial_accumulator_value",)


class TorchOptimizer(Optimizer):
    """An optimiser whose step is one of torch's.

    torch's optimiser is made anew for each step, with a flat piece of the parameters; the arrays of
    its state are the trainer's, which shards and saves them.

    Attributes:
        slots: names of the state's arrays.
        lr: learning rate with which the job's schedule starts.
        options: options of a group of parameters.
        kind: class of torch's optimiser.
        name: name of the class.
    """

    def __init__(self, like: torch.optim.Optimizer, options: Mapping[str, Any]) -> None:
        """Try an optimiser on two numbers with the ``options`` of a group of its parameters.

        Raises:
            ConfigError: it has state that no checkpoint would have.
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
        #: State that is a single number; it is stored as an array of equal numbers.
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
        """An optimiser of a single parameter, at this rate, that has taken no step."""
        begins = {name: self.options[name] for name in _BEGINNINGS if name in self.options}
        made = self._of([{"params": [parameter]}], rate, **begins)
        made.param_groups[0].update(self.options, lr=rate)
        return made

    def _of(
        self, groups: list[dict[str, Any]], rate: float, **begins: Any
    ) -> torch.optim.Optimizer:
        """An optimiser of these groups; a copy, where the class has arguments of its own."""
        if self.kind.__init__.__module__.startswith("torch.optim."):
            return self.kind(groups, lr=rate, **begins)  # type: ignore[call-arg]
        made = object.__new__(self.kind)
        vars(made).update(vars(self._like), state=defaultdict(dict), param_groups=groups)
        return made

    def changed(self, options: Mapping[str, Any]) -> "TorchOptimizer":
        """This optimiser with other values of some options."""
        found = copy(self)
        found.options = {**self.options, **options}
        return found

    def over(self, groups: Sequence["TorchOptimizer"]) -> torch.optim.Optimizer:
        """torch's optimiser with a new parameter for each of these groups."""
        own = [{**one.options, "params": [torch.nn.Parameter(torch.zeros(1))]} for one in groups]
        return self._of(own, self.lr)

    def prepare(self, p: Array, g: Array, state: State, step: int) -> Array:
        """The gradient as it is."""
        self._step = step
        return g

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
        if self._step > 1:  # its first step makes its state, which is not always 0
            made.state[parameter].update(given, step=self._taken(parameter))
        made.step()
        for name, values in own.items():
            found = made.state[parameter][name]
            if name in self._single:
                values.fill_(found)
            elif found.data_ptr() != values.data_ptr():
                values.copy_(found)

    def _taken(self, parameter: torch.Tensor) -> torch.Tensor:
        """Number of steps taken; fused optimisers read it on their device, in float32."""
        kind, where = None, torch.device("cpu")
        if self.options.get("fused"):
            kind, where = torch.float32, parameter.device
        return torch.tensor(float(self._step - 1), dtype=kind, device=where)


def _tried(made: torch.optim.Optimizer, options: Mapping[str, Any]) -> TorchOptimizer:
    """The optimiser of a group, if it updates each number by itself.

    Raises:
        ConfigError: steps on a matrix and on its pieces differ.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            found = TorchOptimizer(made, options)
            why = _difference(found)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, IndexError) as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        if isinstance(error, ConfigError):
            raise
    if why:
        raise ConfigError(
            f"optimizer: a {type(made).__name__} does not update each number by itself ({why}), "
            "which ZeRO and flat buckets need; take one that does, as torch.optim.AdamW, or a loop "
            "of your own with torch's DistributedDataParallel, where any works"
        )
    return found


def _difference(own: TorchOptimizer) -> str:
    """How steps on a matrix differ from steps on its pieces; empty if they do not."""
    draw, rate = torch.Generator().manual_seed(0), max(own.lr, 1e-3)
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
    """The optimisers of a factory's groups, and the group of each parameter.

    Args:
        factory: makes an optimiser of all trained parameters; it is called once.
        named: the parameters by their names in the trainer; empty if there is no module.

    Raises:
        ConfigError: the factory makes no optimiser that updates each number by itself, or one that
            leaves parameters out or has others; or its groups have different state.
    """
    given = named or {"": torch.nn.Parameter(torch.ones(1))}
    made = _new(factory, list(given.values()))
    names = {id(parameter): name for name, parameter in given.items()}
    found: dict[str, ParameterGroup] = {}
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
            group = ParameterGroup(own, own.lr / usual.lr, len(groups) - 1)
            found[names[id(parameter)]] = group
    if left := [name for name in given if name not in found]:
        raise ConfigError(
            f"optimizer: it leaves out {', '.join(left[:3])}; give it all parameters, or freeze "
            "these: requires_grad_(False)"
        )
    first = ParameterGroup(groups[0])  # torch refuses to make one without parameters
    return groups, (found.__getitem__ if named else lambda name: first)


def _new(factory: Factory, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The factory's optimiser, if it is one of torch's without hooks or steps."""
    if not callable(factory):
        raise ConfigError(
            f"optimizer: give a function that makes it of the parameters, as lambda p: "
            f"torch.optim.AdamW(p, lr=3e-3), not a {type(factory).__name__}"
        )
    made = factory(parameters)
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
    # Some have initial state before their first step.
    if any(state and float(state.get("step", 1)) > 0 for state in made.state.values()):
        raise ConfigError(
            "optimizer: it has taken steps already, and the trainer would begin without what it "
            "keeps of them; make a new one, and go on by fit(resume=True)"
        )
    return made
