"""Names of the modules that hold the experts of a torch module."""

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

#: A sentence about what can be shared.
HOW = (
    "experts are a torch.nn.ModuleList (or ModuleDict) of modules that take rows (R, D) and give "
    "as many, or one module with num_experts = E, parameters of E equal parts along their first "
    "axis, and forward(rows (T, D), chosen (T, K), weights (T, K)), as in transformers"
)

#: Forward passes of modules that only hold others.
_WITHOUT: tuple[Any, ...] = (nn.ModuleList.forward, nn.ModuleDict.forward, nn.Module.forward)


def experts_named(module: nn.Module, names: str | Sequence[str]) -> tuple[str, ...]:
    """Full names of the modules that hold experts, in the module's order.

    Args:
        module: the whole module.
        names: their full names, ends of these, or patterns of either, as ``"layers.*.experts"``.

    Raises:
        ValueError: there are none of a name, or they hold no experts that ranks can share.
    """
    known = dict(module.named_modules())
    found = set[str]()
    for name in [names] if isinstance(names, str) else names:
        places = {full for full in known if full and fnmatchcase(f".{full}", f"*.{name}")}
        if not places:
            raise ValueError(
                f"experts: there is no module {name!r} in a {type(module).__name__}; give a name "
                "that print(model) shows, its end, or a pattern, as 'layers.*.experts'"
            )
        found |= places
    users = Counter(id(p) for part in known.values() for p in part.parameters(recurse=False))
    for name in sorted(found):
        if outer := next((one for one in sorted(found) if name.startswith(f"{one}.")), ""):
            raise ValueError(f"experts: {name} lies in {outer}, which has experts itself; name one")
        _expect_apart(name, known[name], users)
    return tuple(name for name in known if name in found)


def is_listed(part: nn.Module) -> bool:
    """Whether experts are modules of their own, rather than parts of one module's parameters."""
    return isinstance(part, (nn.ModuleList, nn.ModuleDict))


def stacked_count(part: nn.Module) -> int:
    """Number of experts in the parameters of one module; 0: it says none."""
    count = getattr(part, "num_experts", 0)
    return count if type(count) is int else 0


def callers_of(whole: nn.Module, part: nn.Module) -> list[nn.Module]:
    """The modules whose forward pass calls the experts of a list: it, or the next ones around it.

    Several modules may have one list.
    """
    places = dict(whole.named_modules(remove_duplicate=False))
    found: dict[nn.Module, None] = {}
    for name in [name for name, one in places.items() if one is part]:
        while name and type(places[name]).forward in _WITHOUT:
            name = name.rpartition(".")[0]
        found[places[name]] = None
    return list(found)


def _expect_apart(name: str, part: nn.Module, users: Counter[int]) -> None:
    """Check that a module holds experts, and nothing that others use, too."""
    what = f"experts: {name} ({type(part).__name__})"
    if is_listed(part):
        experts = list(part._modules.values())
        if not experts or None in experts or len({*experts}) < len(experts):
            raise ValueError(f"{what} has no experts, a place without one, or one twice; {HOW}")
    else:
        count = stacked_count(part)
        sizes = [p.shape[:1] for p in part._parameters.values() if p is not None]
        if not count or not sizes or any(size != (count,) for size in sizes):
            raise ValueError(f"{what} cannot be shared; {HOW}")
        experts = [part]
    for expert in experts:
        assert expert is not None
        own = Counter(id(p) for one in expert.modules() for p in one.parameters(recurse=False))
        for inner, p in expert.named_parameters():
            if own[id(p)] != users[id(p)]:
                raise ValueError(f"{what}: others use {inner} of an expert, too; untie it")
            if not p.dim():
                raise ValueError(f"{what}: {inner} of an expert is one number; give it shape (1,)")
