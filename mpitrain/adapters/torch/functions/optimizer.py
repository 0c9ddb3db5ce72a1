"""Optimisers of torch over the flat pieces of the trainer."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from inspect import Parameter, signature
from math import prod
from typing import Any

import torch

from mpitrain.adapters.torch.arrays import as_tensor, on_stream_of
from mpitrain.adapters.torch.checks.probe import one_line
from mpitrain.adapters.torch.functions.begun import begun
from mpitrain.arrays import Array, Shape
from mpitrain.config import ConfigError
from mpitrain.optim.groups import Grouping, ParameterGroup
from mpitrain.optim.optimizers import Beginning, Optimizer, State

#: Makes an optimiser of some parameters, as ``lambda p: torch.optim.AdamW(p, lr=3e-3)``.
Factory = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]

#: Options that an optimiser reads only when it is made.
_BEGINNINGS = ("initial_accumulator_value",)

_ELSEWHERE = "a loop of your own with torch's DistributedDataParallel, where any works"
_SEVERAL = (
    "; several optimisers, as for the two modules of a GAN, take a loop of your own with torch's "
    "DistributedDataParallel: examples/pytorch/gan.py"
)


class TorchOptimizer(Optimizer):
    """An optimiser whose step is one of torch's.

    torch's optimiser is made anew for each step, with a flat piece of the parameters or a whole
    one; the arrays of its state are the trainer's, which shards and saves them.

    Attributes:
        slots: names of the state's arrays.
        whole: whether a step needs a whole parameter in its shape.  Its state may then have other
            shapes, and lies in the first elements of the slots.
        lr: learning rate with which the job's schedule starts.
        options: options of a group of parameters.
        kind: class of torch's optimiser.
        like: the program's optimiser, which takes no step.
        begun: the state that it was given with.
        name: name of the class.
    """

    def __init__(
        self,
        like: torch.optim.Optimizer,
        options: Mapping[str, Any],
        shapes: Sequence[Shape] = ((2,),),
        *,
        whole: bool = False,
    ) -> None:
        """Try an optimiser with the ``options`` of a group on parameters of these ``shapes``.

        Raises:
            ConfigError: it has state that no checkpoint would have.
        """
        kind = type(like)
        self.like, self.kind, self.whole = like, kind, whole
        self.begun: Mapping[str, Beginning] = {}
        self.name = kind.__name__
        self.options = options
        self._step = 0
        self.lr = float(options["lr"])
        self._shapes, self._counts = tuple(shapes), False
        #: State that is a single number; it is stored as an array of equal numbers.
        self._single: dict[str, torch.dtype | type] = {}
        #: Shapes of the other state of a parameter of some shape, by name.
        self._kept: dict[Shape, dict[str, Shape]] = {}
        slots = {name for shape in shapes for name in (*self._arrays(shape), *self._single)}
        self.slots = tuple(sorted(slots))

    def _arrays(self, shape: Shape) -> dict[str, Shape]:
        """Shapes of the state's arrays for a parameter of this shape."""
        if shape in self._kept:
            return self._kept[shape]
        probe = torch.nn.Parameter(torch.ones(shape, dtype=torch.float64))
        made = self.made(probe, self.lr)
        for _ in range(2):  # some begin to keep something in their second step
            probe.grad = torch.ones_like(probe)
            made.step()
        found: dict[str, Shape] = {}
        for name, value in made.state[probe].items():
            if name == "step":
                self._counts = True
            if value is None or name == "step":
                continue
            if isinstance(value, (int, float)):
                self._single[name] = type(value)
            elif isinstance(value, torch.Tensor) and not value.dim() and shape:
                self._single[name] = value.dtype
            elif not isinstance(value, torch.Tensor) or not self._has_room(value, shape):
                raise ConfigError(
                    f"optimizer: {self.name} keeps {name}, which is no array of the "
                    "parameters' shape, and no checkpoint would have it; take another one"
                )
            else:
                found[name] = tuple(value.shape)
        if self.whole:
            self._kept[shape] = found
        return found

    def _has_room(self, value: torch.Tensor, shape: Shape) -> bool:
        return value.numel() <= prod(shape) if self.whole else tuple(value.shape) == shape

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
        vars(made).update(vars(self.like), state=defaultdict(dict), param_groups=groups)
        return made

    def changed(self, options: Mapping[str, Any]) -> "TorchOptimizer":
        """This optimiser with other values of some options."""
        found = copy(self)
        found.options = {**self.options, **options}
        return found

    def over(self, groups: Sequence["TorchOptimizer"]) -> torch.optim.Optimizer:
        """torch's optimiser with a new parameter for each of these groups."""
        made = [torch.nn.Parameter(torch.zeros(self._shapes[0])) for _ in groups]
        own = [{**one.options, "params": [p]} for one, p in zip(groups, made, strict=True)]
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
        arrays = own
        if self.whole:
            known = self._arrays(tuple(p.shape)).items()
            arrays = {name: own[name][: prod(shape)].view(shape) for name, shape in known}
        if self._step > 1:  # its first step makes its state, which is not always 0
            given = {name: one for name, one in arrays.items() if name not in self._single}
            given |= self._numbers(own)
            made.state[parameter].update(given, step=self._count(self._step - 1, parameter))
        made.step()
        after = made.state[parameter]
        for name in self._single.keys() & after.keys():
            own[name].fill_(after[name])
        for name in arrays.keys() - self._single.keys():
            if after[name].data_ptr() != arrays[name].data_ptr():
                arrays[name].copy_(after[name])

    def state_of(
        self, arrays: Mapping[str, Array], parameter: torch.nn.Parameter, taken: int
    ) -> dict[str, Any]:
        """State of a parameter in torch's form after ``taken`` steps, from flat arrays by slot."""
        own = {name: as_tensor(arrays[name]).to(parameter) for name in self.slots}
        usual = dict.fromkeys(own.keys() - self._single.keys(), tuple(parameter.shape))
        shapes = self._arrays(tuple(parameter.shape)) if self.whole else usual
        found = {name: own[name][: prod(shape)].view(shape) for name, shape in shapes.items()}
        found |= self._numbers(own)
        return found | ({"step": self._count(taken, parameter)} if self._counts else {})

    def _numbers(self, own: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """State that is a single number, by name."""
        found: dict[str, Any] = {}
        for name, kind in self._single.items():
            number = own[name].flatten()[0]
            found[name] = kind(number) if isinstance(kind, type) else number.to(kind)
        return found

    def _count(self, taken: int, parameter: torch.Tensor) -> torch.Tensor:
        """Number of steps; fused optimisers read it on their device, in float32."""
        kind, where = None, torch.device("cpu")
        if self.options.get("fused"):
            kind, where = torch.float32, parameter.device
        return torch.tensor(float(taken), dtype=kind, device=where)


def _tried(
    made: torch.optim.Optimizer, options: Mapping[str, Any], shapes: Sequence[Shape]
) -> TorchOptimizer:
    """The optimiser of a group: one that updates each number by itself, or each parameter.

    Raises:
        ConfigError: steps on two parameters together and apart differ, or it cannot be tried.
    """
    name = type(made).__name__
    step = signature(type(made).step).parameters
    if "closure" in step and step["closure"].default is Parameter.empty:
        raise ConfigError(
            f"optimizer: {name} calls a closure, which computes the loss several times in a step, "
            "and a step of the trainer has one forward and backward pass; take torch.optim.AdamW, "
            f"or {_ELSEWHERE}"
        )
    why: list[str] = []
    for whole, own in ((False, [(2,)]), (True, shapes)):
        try:
            with torch.random.fork_rng(devices=[]):
                found = TorchOptimizer(made, options, own, whole=whole)
                reason = _difference(found, own if whole else [(3, 4)])
        except ConfigError as error:
            if whole:
                raise
            reason = str(error)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, IndexError) as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
        if not reason:
            return found
        why.append(reason)
    raise ConfigError(
        f"optimizer: a {name} does not update each number by itself ({why[0]}), nor each parameter "
        f"({why[1]}), as the trainer's flat buckets need; take torch.optim.AdamW, or {_ELSEWHERE}"
    )


def _difference(own: TorchOptimizer, shapes: Sequence[Shape]) -> str:
    """How torch's steps on two parameters differ from ours on each, or on pieces of it; or ""."""
    draw, rate = torch.Generator().manual_seed(0), max(own.lr, 1e-3)
    begin = [
        torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes for _ in "ab"
    ]
    together = [torch.nn.Parameter(one.clone()) for one in begin]
    apart = [one.clone().numpy() for one in begin]
    if not own.whole:
        apart = [one.reshape(-1) for one in apart]
    states = [{slot: one.reshape(-1) * 0 for slot in own.slots} for one in apart]
    made = own.made(together[0], rate)
    made.param_groups[0]["params"].extend(together[1:])
    for step in range(1, 5):
        gradients = [torch.randn(one.shape, generator=draw, dtype=one.dtype) for one in begin]
        for parameter, gradient in zip(together, gradients, strict=True):
            parameter.grad = gradient.clone()
        made.step()
        for one, gradient, state in zip(apart, gradients, states, strict=True):
            direction = gradient.numpy().reshape(one.shape)
            for part in (...,) if own.whole else (slice(5), slice(5, None)):
                piece = {slot: array[part] for slot, array in state.items()}
                given = own.prepare(one[part], direction[part], piece, step)
                own.apply(one[part], given.copy(), piece, rate)
    moved = [parameter.detach().reshape(-1) for parameter in together]
    if any(torch.equal(one, first.reshape(-1)) for one, first in zip(moved, begin, strict=True)):
        return "it moved nothing when it was tried on a parameter of its own"
    same = all(
        torch.allclose(one, torch.from_numpy(other).reshape(-1), rtol=1e-9, atol=1e-12)
        for one, other in zip(moved, apart, strict=True)
    )
    where = "two parameters together and apart" if own.whole else "a matrix and on its pieces"
    return "" if same else f"steps on {where} differ"


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
    axes = sorted({parameter.dim() for parameter in given.values()})
    shapes: list[Shape] = [tuple(range(2, 2 + count)) for count in axes]
    for asked in made.param_groups:
        options = {k: v for k, v in asked.items() if k != "params"}
        options |= {k: v for k, v in made.defaults.items() if k in _BEGINNINGS}
        own = _tried(made, options, shapes)
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
    groups[0].begun = begun(made, named, groups[0].slots, whole=groups[0].whole)
    first = ParameterGroup(groups[0])  # torch refuses to make one without parameters
    return groups, (found.__getitem__ if named else lambda name: first)


def _new(factory: Factory, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The factory's optimiser, if it is one of torch's without hooks."""
    if not callable(factory):
        raise ConfigError(
            f"optimizer: give a function that makes it of the parameters, as lambda p: "
            f"torch.optim.AdamW(p, lr=3e-3), not a {type(factory).__name__}{_SEVERAL}"
        )
    made = factory(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: the function gives a {type(made).__name__}, and an optimiser of torch is "
            f"needed, as lambda p: torch.optim.AdamW(p, lr=3e-3){_SEVERAL}"
        )
    if made._optimizer_step_pre_hooks or made._optimizer_step_post_hooks:
        raise ConfigError(
            "optimizer: it has hooks on its steps, and nobody would call them, as it is made anew "
            "for each piece of the parameters; do without them"
        )
    return made
