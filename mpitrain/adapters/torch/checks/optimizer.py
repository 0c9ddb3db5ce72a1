"""Watch each step of a program's own optimiser, which is made anew for each piece and step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: What the trainer keeps, or gives anew.
_KEPT = frozenset({"state", "param_groups", "params", "defaults"})


class Reduces(TorchDispatchMode):
    """Notices operations that make fewer numbers of several, as norms do, by the first's name."""

    name = ""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **kwargs or {})
        if not self.name and not op.is_view and torch.Tag.pointwise not in op.tags:
            sizes, given = ([one.numel() for one in _tensors(of)] for of in (found, args))
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


def holding(made: torch.optim.Optimizer) -> str:
    """Attributes in which an optimiser keeps parameters beside groups and state, or ""."""
    known = {id(one) for group in made.param_groups for one in group["params"]}
    for name, value in vars(made).items():
        held = () if name in _KEPT else _leaves(value)
        if any(known & {id(one), one if type(one) is int else 0} for one in held):
            return f"has parameters or their id() in {name}, and gets others in each step"
    return ""


def _held(made: torch.optim.Optimizer) -> dict[str, list[object]]:
    """Attributes and options of an optimiser, in a form that shows changes."""
    own = {n: value for n, value in (vars(made) | made.param_groups[0]).items() if n not in _KEPT}
    return {name: [_mark(one) for one in _leaves(value)] for name, value in own.items()}


def _mark(one: object) -> object:
    is_value = isinstance(one, (int, float, str))
    return one if is_value else (id(one), getattr(one, "_version", 0))


def _tensors(values: object) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def _leaves(value: object) -> Iterator[object]:
    for one in tree_leaves(value):
        yield from one if isinstance(one, (set, frozenset)) else [one]
