"""Optimisers of torch over the flat pieces of the trainer."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpitrain.adapters.torch.arrays import as_tensor, on_stream_of
from mpitrain.adapters.torch.modules.dataflow import tensors
from mpitrain.arrays import Array, Shape
from mpitrain.config import ConfigError
from mpitrain.nn.layer import Verdict
from mpitrain.optim.optimizers import Beginning, Optimizer, State

#: Options that an optimiser reads only when it is made.
BEGINNINGS = ("initial_accumulator_value",)
#: Attributes that the trainer keeps, or gives anew.
_KEPT = frozenset({"state", "param_groups", "params", "defaults"})


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
        trained: the group's parameters, without values.
        verdict: fault of its steps.
    """

    trained: Sequence[torch.Tensor] = ()

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
        self.verdict = Verdict()
        self.name = kind.__name__
        self.options = options
        self._step = 0
        self.lr = float(options["lr"])
        self._counts = False
        #: State that is a single number; it is stored as an array of equal numbers.
        self._single: dict[str, torch.dtype | type] = {}
        #: Types of arrays that are not of the parameters' type.
        self._types: dict[str, torch.dtype] = {}
        #: Shapes of the other state of a parameter of some shape, by name.
        self._kept: dict[Shape, dict[str, Shape]] = {}
        slots = {name for shape in shapes for name in (*self._arrays(shape), *self._single)}
        self.slots = tuple(sorted(slots))
        self.verdict.deferred = True

    def _say(self, fault: str) -> None:
        cure = "keep what it needs in state[p] from the first step on, or take a loop"
        if fault:
            text = f"optimizer: a {self.name} {fault}; {cure} with torch's DistributedDataParallel"
            self.verdict.say(ConfigError(text))

    def _arrays(self, shape: Shape) -> dict[str, Shape]:
        """Shapes of the state's arrays for a parameter of this shape."""
        if shape in self._kept:
            return self._kept[shape]
        probe = torch.nn.Parameter(torch.ones(shape, dtype=torch.float64))
        made = self.made(probe, self.lr)
        for _ in range(2):  # some begin to keep something in their second step
            probe.grad = torch.ones_like(probe)
            self._say(take_step(made, whole=self.whole))
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
            elif not isinstance(value, torch.Tensor) or (
                value.numel() > prod(shape) if self.whole else tuple(value.shape) != shape
            ):
                raise ConfigError(
                    f"optimizer: {self.name} keeps {name}, which is no array of the "
                    "parameters' shape, and no checkpoint would have it; take another one"
                )
            else:
                found[name] = tuple(value.shape)
                if value.dtype != probe.dtype:
                    self._types[name] = value.dtype
        if self.whole:
            self._kept[shape] = found
        return found

    def made(self, parameter: torch.nn.Parameter, rate: float) -> torch.optim.Optimizer:
        """An optimiser of a single parameter, at this rate, that has taken no step."""
        begins = {name: self.options[name] for name in BEGINNINGS if name in self.options}
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
        """torch's optimiser of these groups, whose parameters have shapes and no values."""
        # A scheduler changes a rate that is a tensor in place.
        own = [{**one.options, "lr": one.lr, "params": one.trained} for one in groups]
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
        given = self._state(own, parameter, self._step - 1)
        if self._step > 1:  # its first step makes its state, which is not always 0
            made.state[parameter].update(given)
        self._say(take_step(made, whole=self.whole))
        for name in made.state[parameter].keys() - {*self.slots, "step"}:
            if made.state[parameter][name] is not None:
                self._say(f"begins to keep {name} in step {self._step}, which no checkpoint has")
        for name in own.keys() & made.state[parameter].keys():
            after = made.state[parameter][name]
            if name in self._single:
                own[name].fill_(after)
            elif after.data_ptr() != own[name].data_ptr():
                own[name][: after.numel()].view(after.shape).copy_(after)

    def state_of(
        self, arrays: Mapping[str, Array], parameter: torch.nn.Parameter, taken: int
    ) -> dict[str, Any]:
        """State of a parameter in torch's form after ``taken`` steps, from flat arrays by slot."""
        own = {name: as_tensor(arrays[name]).to(parameter) for name in self.slots}
        return self._state(own, parameter, taken)

    def _state(
        self, own: Mapping[str, torch.Tensor], parameter: torch.Tensor, taken: int
    ) -> dict[str, Any]:
        """As :meth:`state_of`, with views of flat tensors."""
        shape = tuple(parameter.shape)
        usual = dict.fromkeys(own.keys() - self._single.keys(), shape)
        shapes = self._arrays(shape) if self.whole else usual
        found: dict[str, Any] = {
            n: own[n][: prod(shape)].view(shape).to(self._types.get(n, own[n].dtype))
            for n, shape in shapes.items()
        }
        for name, kind in self._single.items():
            number = own[name].flatten()[0]
            found[name] = kind(number) if isinstance(kind, type) else number.to(kind)
        return found | ({"step": self._count(taken, parameter)} if self._counts else {})

    def _count(self, taken: int, parameter: torch.Tensor) -> torch.Tensor:
        """Number of steps; fused optimisers read it on their device, in float32."""
        kind, where = None, torch.device("cpu")
        if self.options.get("fused"):
            kind, where = torch.float32, parameter.device
        return torch.tensor(float(taken), dtype=kind, device=where)


class Reduces(TorchDispatchMode):
    """Notices operations that make fewer numbers of several, as norms do, by the first's name."""

    name = ""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **kwargs or {})
        if not self.name and not op.is_view and torch.Tag.pointwise not in op.tags:
            sizes, given = ([one.numel() for one in tensors(of)] for of in (found, args))
            if sizes and max(given, default=0) > max(sizes):
                self.name = op.overloadpacket.__name__
        return found


def take_step(made: torch.optim.Optimizer, *, whole: bool) -> str:
    """Take a step of an optimiser with one parameter, or a piece of one.

    Returns what it does that is lost, or another thing for pieces; "" if there is nothing.
    """
    if type(made).step.__module__.startswith("torch.optim."):
        made.step()
        return ""
    before = _held(made)
    with Reduces() as reduces:
        made.step()
    after = _held(made)
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if changed or len(made.state) > 1:
        what = ", ".join(changed[:3]) or "state of no parameter"
        return f"changes {what}, which is lost, as it is made anew for each step and piece"
    if reduces.name and not whole:
        return f"takes numbers of a parameter together ({reduces.name}), which parallel.zero cuts"
    return ""


def _held(made: torch.optim.Optimizer) -> dict[str, list[object]]:
    """Attributes and options of an optimiser, in a form that shows changes."""
    own = {n: value for n, value in (vars(made) | made.param_groups[0]).items() if n not in _KEPT}
    return {name: [_mark(one) for one in _leaves(value)] for name, value in own.items()}


def _mark(one: object) -> object:
    is_value = isinstance(one, (int, float, str))
    return one if is_value else (id(one), getattr(one, "_version", 0))


def _leaves(value: object) -> Iterator[object]:
    for one in tree_leaves(value):
        yield from one if isinstance(one, (set, frozenset)) else [one]
