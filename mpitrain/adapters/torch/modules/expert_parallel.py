"""Expert parallelism within a torch module: each rank of a group has some of its experts.

The module's own router chooses, and rows travel (``expert_ways``).  Code that calls the experts of
a list one by one runs twice: first to see the rows of all of them, which then travel together, and
again with what the experts made of them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from mpitrain.adapters.torch.arrays import named_tensors
from mpitrain.adapters.torch.modules.drawing import remembered
from mpitrain.adapters.torch.modules.expert_names import HOW, callers_of, is_listed
from mpitrain.adapters.torch.modules.expert_ways import Bank, ExpertRegion
from mpitrain.adapters.torch.modules.regions import Share
from mpitrain.adapters.torch.modules.stand_ins import stand_ins
from mpitrain.group import TensorGroup
from mpitrain.group import share as part_of

Forward = Callable[..., Any]

_REFUSAL = (
    f"parallel.experts: {{name}} cannot be shared as experts= says ({{fault}}); {HOW}; or leave "
    "parallel.experts out"
)


def expert_share(
    module: nn.Module, names: Sequence[str], group: TensorGroup, algorithm: str
) -> Share:
    """A rank's share of a module, or of a part of one that has some of the experts.

    Args:
        module: the module.
        names: full names of modules that hold experts.
        group: the ranks that have a share of the experts each, the first ones the first rank.
        algorithm: algorithm of the all-to-alls of rows.

    Raises:
        ValueError: it cannot be; the text follows the module's name.
    """
    region = ExpertRegion(group, algorithm)
    copied = region.copy_of(module)
    parts = dict(copied.named_modules())
    owners, stacked, served = dict[str, int](), set[str](), set[str]()
    callers: dict[nn.Module, list[ListBank]] = {}
    for name in names:
        part = parts.get(name)
        if part is None or not [*part.parameters()]:  # another stage has it
            continue
        served |= {f"{name}.{own}" for own, _ in part.named_parameters()}
        around = callers_of(copied, part) if is_listed(part) else [part]
        if any(True for one in around for _ in stand_ins(one)):
            raise ValueError(
                f"has a batch norm around {name}, where rows lie on other ranks or the code runs "
                "twice; take group or layer norm there"
            )
        if is_listed(part):
            listed = ListBank(region, name, part)
            for one in around:
                callers.setdefault(one, []).append(listed)
            experts = list(part._modules)
            for rank in range(group.size):
                for number in experts[part_of(len(experts), rank, group.size)]:
                    inside = part.get_submodule(number).named_parameters()
                    owners |= {f"{name}.{number}.{own}": rank for own, _ in inside}
        else:
            bank = StackBank(region, name, part)
            each = named_tensors(part).items()
            stacked |= {f"{name}.{own}" for own, one in each if one.shape[:1] == (bank.experts,)}
    for caller, banks in callers.items():
        caller.forward = partial(_around, banks, caller.forward)
    return Share(
        copied, region, owners=owners, stacked=frozenset(stacked), served=frozenset(served),
        refusal=_REFUSAL,
    )  # fmt: skip


class StackBank(Bank):
    """Experts in the parameters of one module."""

    def __init__(self, region: ExpertRegion, name: str, part: nn.Module) -> None:
        """Let the module have this rank's experts, and communicate from now on."""
        count: Any = part.num_experts
        super().__init__(region, name, part, [part] * count)
        part.num_experts = len(self.own)  # type: ignore[assignment]
        self._taken = signature(part.forward)
        self._real, part.forward = part.forward, self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The forward pass of the module, for rows, their experts, and weights of these."""
        hidden, chosen, weights = self._taken.bind(*args, **kwargs).args
        if not (
            _is_rows(hidden) and hidden.dim() == chosen.dim() == 2
            and len(hidden) == len(chosen) and chosen.shape == weights.shape
            and not chosen.is_floating_point() and weights.is_floating_point()
        ):  # fmt: skip
            raise ValueError(f"{self.name} is called with something else than rows and choices")
        expert = chosen.reshape(-1)
        order = expert.argsort(stable=True)
        order = order[(expert[order] >= 0) & (expert[order] < self.experts)]
        counts = torch.bincount(expert[order], minlength=self.experts)
        at = order // chosen.shape[1]
        made = self.exchange(hidden[at], counts.cpu().numpy())
        y = made * weights.reshape(-1)[order, None]
        found: torch.Tensor = torch.zeros_like(hidden).index_add(0, at, y.to(hidden.dtype))
        return found

    def serve(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        sizes = [len(one) for one in parts]
        if not sum(sizes):
            return parts
        rows = torch.cat(list(parts))
        experts = torch.arange(len(parts), device=rows.device)
        chosen = experts.repeat_interleave(torch.tensor(sizes, device=rows.device))[:, None]
        with self.region.serving():
            y = self._real(rows, chosen, torch.ones_like(chosen, dtype=rows.dtype))
        return _like(rows, y).split(sizes)


class ListBank(Bank):
    """Experts in a list, which the code of the module around it calls one by one.

    Attributes:
        calls: calls of the experts while that module runs.
    """

    def __init__(self, region: ExpertRegion, name: str, part: nn.Module) -> None:
        """Let the experts communicate from now on."""
        super().__init__(region, name, part, list(part.children()))
        self.calls: _Calls | None = None
        for number, expert in enumerate(part.children()):
            expert.forward = partial(self._called, number, expert.forward)

    def _called(self, number: int, real: Forward, *args: Any, **kwargs: Any) -> Any:
        """The call of an expert."""
        if self.region.serves:
            return real(*args, **kwargs)
        if self.calls is None:
            raise RuntimeError(
                f"{self.name} is called outside of the forward() of the module around it; give "
                "torch.utils.checkpoint that module rather than a part of its forward()"
            )
        given = [*args, *kwargs.values()]
        if len(given) != 1 or not _is_rows(given[0]):
            raise ValueError(f"an expert of {self.name} is called with more than rows of numbers")
        return self.calls(number, given[0])

    def answer(self) -> None:
        """Let the calls so far have their results; collective."""
        assert self.calls is not None
        rows = self.calls.rows
        order = sorted(range(len(rows)), key=lambda place: rows[place][0])
        flat = [rows[place][1].reshape(-1, rows[place][1].shape[-1]) for place in order]
        counts, asked = np.zeros(self.experts, int), np.zeros(self.experts, bool)
        for place, own in zip(order, flat, strict=True):
            counts[rows[place][0]] += len(own)
            asked[rows[place][0]] = True
        every = torch.cat(flat) if flat else None
        made = self.exchange(every, np.where(asked & (counts == 0), -1, counts))
        parts = dict(zip(order, made.split([len(own) for own in flat]), strict=True))
        self.calls.results = iter(
            [(number, parts[place].reshape(x.shape)) for place, (number, x) in enumerate(rows)]
        )

    def serve(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with self.region.serving():
            return [
                _like(rows, expert(rows)) if len(rows) else rows
                for expert, rows in zip(self.own, parts, strict=True)
            ]


class _Calls:
    """Calls of the experts of a list while the module around runs: first rows, then results.

    Attributes:
        rows: number of the expert and rows of each call in the first run.
        results: number of the expert and results of each call in the second run; None before it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.rows: list[tuple[int, torch.Tensor]] = []
        self.results: Iterator[tuple[int, torch.Tensor]] | None = None

    def __call__(self, number: int, x: torch.Tensor) -> torch.Tensor:
        if self.results is None:
            self.rows.append((number, x))
            return torch.zeros_like(x)
        expert, y = next(self.results, (-1, x))
        if expert != number or y.shape != x.shape:
            raise ValueError(
                f"the experts of {self._name} are called otherwise the second time: which rows an "
                "expert gets must not depend on what another one gives"
            )
        return y

    def expect_all_taken(self) -> None:
        """Check that the second run has called the experts as often as the first one."""
        if next(self.results or iter(()), None) is not None:
            raise ValueError(f"the experts of {self._name} are called less often the second time")


def _around(banks: Sequence[ListBank], real: Forward, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a module that calls listed experts."""
    given = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    before = [bank.calls for bank in banks]
    calls = [_Calls(bank.name) for bank in banks]
    again = remembered()
    try:
        for bank, own in zip(banks, calls, strict=True):
            bank.calls = own
        real(*given[0], **given[1])
        for bank in banks:
            bank.answer()
        again()
        found = real(*args, **kwargs)
        for own in calls:
            own.expect_all_taken()
    finally:
        for bank, earlier in zip(banks, before, strict=True):
            bank.calls = earlier
    return found


def _is_rows(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 0


def _like(rows: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Results ``y`` of experts, of the shape and type of their rows; ValueError: they are not."""
    if y.shape != rows.shape or y.dtype != rows.dtype:
        raise ValueError(f"experts make {tuple(y.shape)} of {tuple(rows.shape)}")
    return y
