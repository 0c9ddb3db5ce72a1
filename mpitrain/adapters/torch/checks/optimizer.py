"""Watch each step of a program's own optimiser, which is made anew for each piece and step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: What the trainer keeps, or gives anew.
_KEPT = frozenset({"state", "param_groups", "params", "defaults"})


class Reduces(TorchDispatchMode):
    """Notices operations that make fewer numbers of several, as norms do.

    Attributes:
        name: name of the first one; empty: there was none.
    """

    name = ""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **kwargs or {})
        if not self.name and not function.is_view and torch.Tag.pointwise not in function.tags:
            sizes = [one.numel() for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
            given = [one.numel() for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
            if sizes and max(given, default=0) > max(1, *sizes):
                self.name = function.overloadpacket.__name__
        return found


def take_step(made: torch.optim.Optimizer, *, whole: bool) -> str:
    """Take a step of an optimiser with one parameter, or a piece of one.

    Returns what it does that is lost, or another thing for pieces; "" if there is nothing.
    """
    if type(made).step.__module__.startswith("torch.optim."):
        made.step()
        return ""
    before = dict(_held(made))
    with Reduces() as reduces:
        made.step()
    after = dict(_held(made))
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if changed or len(made.state) > 1:
        what = ", ".join(changed[:3]) or "state of no parameter"
        return f"changes {what}, which is lost, as it is made anew for each step and piece"
    if reduces.name and not whole:
        return f"takes numbers of a parameter together ({reduces.name})"
    return ""


def holding(made: torch.optim.Optimizer) -> str:
    """Name of an attribute in which an optimiser has its parameters or their ids; or ""."""
    known = {id(one) for group in made.param_groups for one in group["params"]}
    for name, value in vars(made).items():
        if name not in _KEPT and any(
            id(one) in known or (type(one) is int and one in known) for one in _leaves(value)
        ):
            return name
    return ""


def _held(made: torch.optim.Optimizer) -> Iterator[tuple[str, list[object]]]:
    """Attributes and options of an optimiser, in a form that shows changes."""
    for name, value in (vars(made) | made.param_groups[0]).items():
        if name not in _KEPT:
            yield (
                name,
                [
                    one
                    if isinstance(one, (int, float, str))
                    else (id(one), getattr(one, "_version", 0))
                    for one in _leaves(value)
                ],
            )


def _leaves(value: object) -> Iterator[object]:
    for one in tree_leaves(value):
        yield from one if isinstance(one, (set, frozenset)) else [one]
