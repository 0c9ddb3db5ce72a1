"""The optimisers of a program's function: one for each of its groups."""

from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch

from mpitrain.adapters.torch.checks.probe import MISFITS, one_line
from mpitrain.adapters.torch.functions.optimizer import BEGINNINGS, TorchOptimizer
from mpitrain.arrays import Shape
from mpitrain.config import ConfigError
from mpitrain.optim.groups import Grouping, ParameterGroup
from mpitrain.optim.optimizers import Beginning

#: Makes an optimiser of some parameters, as ``lambda p: torch.optim.AdamW(p, lr=3e-3)``.
Factory = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]

#: Optimisers of torch that go by whole parameters.
_OF_WHOLE = torch.optim.Adafactor, torch.optim.Muon
_ELSEWHERE = "a loop of your own with torch's DistributedDataParallel, where any works"
_SEVERAL = (
    "; several optimisers, as for the two modules of a GAN, take a loop of your own with torch's "
    "DistributedDataParallel: examples/pytorch/gan.py"
)


def grouped(
    factory: Factory, named: Mapping[str, torch.nn.Parameter], *, is_cut: bool = False
) -> tuple[list[TorchOptimizer], Grouping]:
    """The optimisers of a factory's groups, and the group of each parameter.

    Args:
        factory: makes an optimiser of all trained parameters; it is called once.
        named: the parameters by their names in the trainer; empty if there is no module.
        is_cut: whether ranks have parts of parameters.

    Raises:
        ConfigError: the factory makes no optimiser of torch, or one that leaves parameters out or
            has others; or its groups have different state.
    """
    given = named or {"": torch.nn.Parameter(torch.ones(1))}
    made = _new(factory, list(given.values()))
    names = {id(parameter): name for name, parameter in given.items()}
    found: dict[str, ParameterGroup] = {}
    groups: list[TorchOptimizer] = []
    for asked in made.param_groups:
        options = {k: v for k, v in asked.items() if k != "params"}
        options |= {k: v for k, v in made.defaults.items() if k in BEGINNINGS}
        axes = sorted({parameter.dim() for parameter in asked["params"]})
        shapes: list[Shape] = [tuple(range(2, 2 + count)) for count in axes]
        own = _of_group(made, options, shapes, is_cut)
        own.trained = [torch.empty_like(p, device="meta") for p in asked["params"]]
        groups.append(own)
        usual = groups[0]
        own.verdict = usual.verdict
        if not usual.lr:
            raise ConfigError("optimizer: the first group's rate, which schedules multiply, is 0")
        if own.slots != usual.slots:
            raise ConfigError(
                "optimizer: all groups must keep the same: "
                f"{', '.join(usual.slots) or 'nothing'}, not {', '.join(own.slots) or 'nothing'}; "
                "turn momentum, amsgrad and the like on in all groups, or in none"
            )
        group = ParameterGroup(own, own.lr / usual.lr, len(groups) - 1)
        for parameter in asked["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"optimizer: it has a parameter of shape {tuple(parameter.shape)} that is none "
                    "of those that the function was called with; take them from its argument"
                )
            found[names[id(parameter)]] = group
    if left := [name for name in given if name not in found]:
        raise ConfigError(
            f"optimizer: it leaves out {', '.join(left[:3])}; give it all parameters, or freeze "
            "these: requires_grad_(False)"
        )
    groups[0].begun = _begun(made, named, groups[0].slots, whole=groups[0].whole)
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


def _of_group(
    made: torch.optim.Optimizer, options: Mapping[str, Any], shapes: Sequence[Shape], is_cut: bool
) -> TorchOptimizer:
    """The optimiser of a group: one that updates each number by itself, or each parameter.

    torch's own code is known.  Other code has whole parameters where ranks have them; the shadow
    tells where it needs more than it has.  ConfigError: its steps cannot be taken one by one.
    """
    name, kind = type(made).__name__, type(made)
    step = signature(kind.step).parameters
    closes = ConfigError(
        f"optimizer: {name} calls a closure, which computes the loss several times in a step, "
        "and a step of the trainer has one forward and backward pass; take torch.optim.AdamW, "
        f"or {_ELSEWHERE}"
    )
    if "closure" in step and step["closure"].default is Parameter.empty:
        raise closes
    is_own = not kind.step.__module__.startswith("torch.optim.")
    whole = isinstance(made, _OF_WHOLE) or (is_own and not is_cut)
    try:
        with torch.random.fork_rng(devices=[]):
            return TorchOptimizer(made, options, shapes if whole else [(2,)], whole=whole)
    except ConfigError:
        raise
    except (AttributeError, KeyError, *MISFITS) as error:
        if "closure" in step and "'NoneType' object is not callable" in str(error):
            raise closes from error
        raise ConfigError(
            f"optimizer: a {name} cannot take a step on a parameter of its own "
            f"({type(error).__name__}: {one_line(error)}); take torch.optim.AdamW, or {_ELSEWHERE}"
        ) from error


def _begun(
    made: torch.optim.Optimizer,
    named: Mapping[str, torch.nn.Parameter],
    slots: Collection[str],
    *,
    whole: bool,
) -> dict[str, Beginning]:
    """The state of each parameter that has had a step, by the parameters' names.

    Args:
        made: the program's optimiser.
        named: its parameters.
        slots: names of the arrays that an optimiser of its kind keeps.
        whole: whether their shapes may be others than the parameters'.

    Raises:
        ConfigError: it keeps something else.
    """
    found = {}
    for name, parameter in named.items():
        state = {k: v for k, v in made.state.get(parameter, {}).items() if v is not None}
        taken = int(state.pop("step", 1 if state else 0))
        if not taken:
            continue  # some have initial state before their first step
        if state.keys() - set(slots) or not (whole or state.keys() == set(slots)):
            raise ConfigError(
                f"optimizer: it has taken steps and keeps {', '.join(state) or 'nothing'} of "
                f"{name}, and a new one keeps {', '.join(slots) or 'nothing'}; load the state of "
                "its own kind, or make a new one"
            )
        arrays = {}
        for slot, value in state.items():
            flat = torch.zeros(parameter.numel(), dtype=torch.float64)
            kept = torch.as_tensor(value).detach().to(flat)
            if kept.dim():
                flat[: kept.numel()] = kept.flatten()
            else:
                flat.fill_(kept)
            arrays[slot] = flat.numpy()
        found[name] = Beginning(taken, arrays)
    return found
