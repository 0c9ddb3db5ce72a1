"""Expert parallelism within a torch module: each rank of a group has some of its experts.

The module's own router chooses.  Rows travel to the ranks of their experts and back by two
all-to-alls forward and two backward, as in :mod:`mpitrain.nn.experts`.  Code that calls the experts
of a list one by one runs twice: first to see the rows of all of them, which then travel together,
and again with what the experts made of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mpitrain.adapters.torch.arrays import as_array, as_tensor
from mpitrain.adapters.torch.modules.drawing import Drawing, remembered
from mpitrain.adapters.torch.modules.expert_names import HOW, caller_of, is_listed
from mpitrain.adapters.torch.modules.stand_ins import stand_ins
from mpitrain.adapters.torch.modules.tensor_parallel import AgreedFault, Region, Share
from mpitrain.group import TensorGroup
from mpitrain.group import share as part_of
from mpitrain.nn.experts import Dispatch

Forward = Callable[..., Any]


@dataclass(frozen=True)
class ExpertShare(Share):
    """A rank's share of a module with experts.

    Attributes:
        owners: ranks of the parameters of experts in lists, by name.
        stacked: parameters and buffers of which axis 0 counts experts.
    """

    owners: Mapping[str, int] = field(default_factory=dict)
    stacked: frozenset[str] = frozenset()

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        group = self.region.group
        if name in self.stacked:
            return whole[group.share(len(whole))]
        return whole if self.owners.get(name, group.rank) == group.rank else whole[:0]

    def follow(self, source: Callable[[], Any]) -> None:
        """``source`` gives the origin of the random numbers of the present pass."""
        assert isinstance(self.region, ExpertRegion)
        self.region.source = source

    def terms(self, name: str) -> int:
        return self.region.group.size if name in self.served else 1

    def refusal(self, name: str, fault: str) -> str:
        return (
            f"parallel.experts: {name} cannot be shared as experts= says ({fault}); {HOW}; or "
            "leave parallel.experts out"
        )


class Bank(NamedTuple):
    """The experts of one module that ranks share.

    Attributes:
        name: the module's full name.
        module: the module.
        experts: number of experts on all ranks.
        units: modules whose parameters have gradients where a rank has called them: the experts of
            a list, or the module of a stack.
        own: number of the unit of each of this rank's experts.
        serve: gives the results of this rank's experts for the rows of each.
    """

    name: str
    module: nn.Module
    experts: int
    units: Sequence[nn.Module]
    own: Sequence[int]
    serve: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class _Calls:
    """Calls of listed experts while the module around them runs: first rows, then results."""

    def __init__(self, banks: Sequence[Bank]) -> None:
        self.rows: dict[str, list[tuple[int, torch.Tensor]]] = {bank.name: [] for bank in banks}
        self.results: dict[str, Iterator[tuple[int, torch.Tensor]]] | None = None

    def __call__(self, bank: str, number: int, x: torch.Tensor) -> torch.Tensor:
        if self.results is None:
            self.rows[bank].append((number, x))
            return torch.zeros_like(x)
        expert, y = next(self.results[bank], (-1, x))
        if expert != number or y.shape != x.shape:
            raise ValueError(
                f"the experts of {bank} are called otherwise the second time: which rows an expert "
                "gets must not depend on what another one gives"
            )
        return y

    def expect_all_taken(self) -> None:
        """Check that the second run has called the experts as often as the first one."""
        for bank, rest in (self.results or {}).items():
            if next(rest, None) is not None:
                raise ValueError(f"the experts of {bank} are called less often the second time")


class ExpertRegion(Region):
    """Ways of rows to the experts of a module on other ranks, and back.

    Attributes:
        algorithm: algorithm of the all-to-alls of rows.
        is_trial: whether all ranks try the module, and agree about faults.
        source: gives the origin of the random numbers of the present pass.
    """

    def __init__(self, group: TensorGroup, algorithm: str) -> None:
        super().__init__(group)
        self.algorithm = algorithm
        self.is_trial = False
        self.source: Callable[[], Any] = lambda: None
        self._is_apart = self._serves = False
        self._calls: _Calls | None = None
        self._last: torch.Tensor | None = None

    def begin(self, *_: Any) -> None:
        self._last = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Nothing is sent in this block; rows of other ranks' experts become zeros."""
        before, self._is_apart = self._is_apart, True
        try:
            yield
        finally:
            self._is_apart = before

    @contextmanager
    def trying(self) -> Iterator[None]:
        before, self.is_trial = self.is_trial, True
        try:
            yield
        finally:
            self.is_trial = before

    def check(self) -> None:
        """In a trial, stop before a message that a rank with a fault does not come to."""
        if self.is_trial and self.agree(""):
            raise AgreedFault("another rank has seen a fault in it")

    @contextmanager
    def serving(self) -> Iterator[None]:
        """This rank's experts run; ``fault`` of the pass says that they have drawn numbers."""
        source, before = self.source(), self._serves
        drawn = len(source.shapes) if isinstance(source, Drawing) else 0
        self._serves = True
        try:
            yield
        finally:
            self._serves = before
        if isinstance(source, Drawing) and len(source.shapes) > drawn:
            source.fault = source.fault or "an expert draws random numbers for rows of many samples"

    # Experts in a list.

    def called(self, bank: str, number: int, real: Forward, *args: Any, **kwargs: Any) -> Any:
        """The call of an expert of a list."""
        if self._serves:
            return real(*args, **kwargs)
        if self._calls is None:
            raise ValueError(f"{bank} is called outside of the forward() of the module around it")
        if kwargs or len(args) != 1 or not _is_rows(args[0]):
            raise ValueError(f"an expert of {bank} is called with more than rows of numbers")
        return self._calls(bank, number, args[0])

    def around(self, banks: Sequence[Bank], real: Forward, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a module that calls listed experts."""
        given = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        anchors = [one for one in _leaves((args, kwargs)) if one.requires_grad]
        before, self._calls = self._calls, (calls := _Calls(banks))
        again = remembered(self.source())
        try:
            real(*given[0], **given[1])
            results = {bank.name: self._of_calls(bank, calls, anchors) for bank in banks}
            calls.results = {name: iter(own) for name, (own, _) in results.items()}
            again()
            found = real(*args, **kwargs)
            calls.expect_all_taken()
        finally:
            self._calls = before
        for _, made in results.values():
            found = self._tied(found, made)
        return found

    def _of_calls(
        self, bank: Bank, calls: _Calls, anchors: Sequence[torch.Tensor]
    ) -> tuple[list[tuple[int, torch.Tensor]], torch.Tensor]:
        """Results of the calls, in their order; and all of them, from which gradients return."""
        made = calls.rows[bank.name]
        order = sorted(range(len(made)), key=lambda place: made[place][0])
        flat = [made[place][1].reshape(-1, made[place][1].shape[-1]) for place in order]
        counts = np.zeros(bank.experts, int)
        asked = np.zeros(bank.experts, bool)
        for place, rows in zip(order, flat, strict=True):
            counts[made[place][0]] += len(rows)
            asked[made[place][0]] = True
        every = torch.cat(flat) if flat else None
        found = self.exchange(bank, every, np.where(asked & (counts == 0), -1, counts), anchors)
        parts = dict(zip(order, found.split([len(rows) for rows in flat]), strict=True))
        return [(n, parts[place].reshape(x.shape)) for place, (n, x) in enumerate(made)], found

    def serve_list(
        self, experts: Sequence[nn.Module], parts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Results of this rank's experts of a list for the rows of each."""
        found = []
        with self.serving():
            for expert, rows in zip(experts, parts, strict=True):
                y = expert(rows) if len(rows) else rows
                if y.shape != rows.shape or y.dtype != rows.dtype:
                    raise ValueError(f"an expert makes {tuple(y.shape)} of {tuple(rows.shape)}")
                found.append(y)
        return found

    # Experts in the parameters of one module.

    def stacked(
        self, bank: Bank, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The forward pass of a module of stacked experts: rows, their experts, and weights."""
        if not (
            _is_rows(hidden) and hidden.dim() == chosen.dim() == 2
            and len(hidden) == len(chosen) and chosen.shape == weights.shape
            and not chosen.is_floating_point() and weights.is_floating_point()
        ):  # fmt: skip
            raise ValueError(f"{bank.name} is called with something else than rows and choices")
        expert = chosen.reshape(-1)
        order = expert.argsort(stable=True)
        order = order[(expert[order] >= 0) & (expert[order] < bank.experts)]
        counts = torch.bincount(expert[order], minlength=bank.experts)
        at = order // chosen.shape[1]
        made = self.exchange(bank, hidden[at], counts.cpu().numpy(), [hidden])
        y = made * weights.reshape(-1)[order, None]
        found = torch.zeros_like(hidden).index_add(0, at, y.to(hidden.dtype))
        tied: torch.Tensor = self._tied(found, made)
        return tied

    def serve_stack(self, real: Forward, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Results of this rank's experts of a stack for the rows of each."""
        rows, sizes = torch.cat(list(parts)), [len(one) for one in parts]
        if not len(rows):
            return list(parts)
        experts = torch.arange(len(parts), device=rows.device)
        chosen = experts.repeat_interleave(torch.tensor(sizes, device=rows.device))[:, None]
        with self.serving():
            y = real(rows, chosen, torch.ones_like(chosen, dtype=rows.dtype))
        if y.shape != rows.shape or y.dtype != rows.dtype:
            raise ValueError(f"experts make {tuple(y.shape)} of {tuple(rows.shape)}")
        return list(y.split(sizes))

    # The way of both.

    def exchange(
        self,
        bank: Bank,
        rows: torch.Tensor | None,
        counts: np.ndarray[Any, Any],
        anchors: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Results of the experts of all ranks for rows, which lie expert after expert; collective.

        Args:
            bank: the experts.
            rows: the rows, (R, D); None: there are none.
            counts: rows of each expert, as :class:`Dispatch` takes them.
            anchors: tensors before the router, whose gradients wait for those of the rows.
        """
        like = next(bank.module.parameters())
        if rows is None:
            rows = like.new_zeros(0, 0)
        if rows.dtype != like.dtype:
            raise ValueError(f"{bank.name} gets rows of {rows.dtype} for numbers of {like.dtype}")
        if self._is_apart:
            own, ends = self.group.share(bank.experts), counts.clip(0).cumsum()
            start, stop = (int(ends[n - 1]) if n else 0 for n in (own.start, own.stop))
            made = bank.serve(rows[start:stop].split(counts.clip(0)[own].tolist()))
            return torch.cat([torch.zeros_like(rows[:start]), *made, torch.zeros_like(rows[stop:])])
        sent, counts = (rows, counts) if self.counts else (rows[:0], counts * 0)
        after = [] if self._last is None else [self._last]
        parameters = [p for unit in bank.units for p in unit.parameters()]
        found: torch.Tensor = _Way.apply(
            self, bank, counts, torch.is_grad_enabled(), sent, *parameters, *anchors, *after
        )
        if found.requires_grad and torch._C._current_graph_task_id() == -1:
            self._last = found  # so that all ranks go backward through these ways in one order
        return found if self.counts else torch.cat([found, torch.zeros_like(rows)])

    def _tied(self, found: Any, made: torch.Tensor) -> Any:
        """The results, whose backward pass goes through ``made`` even if no row was sent."""
        if not made.requires_grad:
            return found

        def tied(one: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = _Tie.apply(one, made) if one.is_floating_point() else one
            return y

        return tree_map_only(torch.Tensor, tied, found)


class _Way(torch.autograd.Function):
    """Rows to their experts and back; backward, gradients by the results, and by the rows."""

    @staticmethod
    def forward(
        ctx: Any, region: ExpertRegion, bank: Bank, counts: np.ndarray[Any, Any], graded: bool,
        rows: torch.Tensor, *others: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        region.check()
        sent = as_array(rows.contiguous(), region.xp)
        way = Dispatch(region.group, counts, region.algorithm, rows.shape[1])
        if not len(sent):
            sent = region.xp.empty((0, way.width), sent.dtype)
        arrived = way.there(sent)
        with torch.set_grad_enabled(graded):
            given = [as_tensor(part).requires_grad_(graded) for part in arrived]
            made = bank.serve(given)
        region.check()
        back = way.back([as_array(part, region.xp) for part in made], sent)
        ctx.region, ctx.way, ctx.given, ctx.made = region, way, given, made
        ctx.units = [list(unit.parameters()) for unit in bank.units]
        ctx.own = bank.own
        return as_tensor(back)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        region, way, given, made = ctx.region, ctx.way, ctx.given, ctx.made
        ctx.given = ctx.made = None
        region.check()
        sent = as_array(dy.contiguous(), region.xp)
        arrived = [as_tensor(part) for part in way.there(sent)]
        pairs = [(y, g) for y, g in zip(made, arrived, strict=True) if len(g) and y.requires_grad]
        every = [p for unit in ctx.units for p in unit]
        trained = [p for p in every if p.requires_grad]
        wanted = [*given, *trained]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs:
            y, by = zip(*pairs, strict=True)
            found = torch.autograd.grad(y, wanted, by, allow_unused=True)
        slopes = [torch.zeros_like(x) if g is None else g for x, g in zip(given, found)]
        region.check()
        rows = as_tensor(way.back([as_array(part, region.xp) for part in slopes], sent))
        gradients: dict[int, torch.Tensor | None] = {}
        gradients |= {id(p): g for p, g in zip(trained, found[len(given) :], strict=True)}
        for is_asked, number in zip(way.asked, ctx.own, strict=True):
            for p in ctx.units[number] if is_asked else ():
                if p.requires_grad and gradients[id(p)] is None:
                    gradients[id(p)] = torch.zeros_like(p)  # called with no rows
        by_rows = rows if ctx.needs_input_grad[4] else None
        rest = [None] * (len(ctx.needs_input_grad) - 5 - len(every))
        return None, None, None, None, by_rows, *(gradients.get(id(p)) for p in every), *rest


class _Tie(torch.autograd.Function):
    """Forward x; backward the gradient, and zeros for ``made``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype, ctx.device = made.shape, made.dtype, made.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy, torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)


def expert_share(
    module: nn.Module, names: Sequence[str], group: TensorGroup, algorithm: str
) -> ExpertShare:
    """A rank's share of a module, or of a part of one that has some of the experts.

    Args:
        module: the module.
        names: full names of modules that hold experts.
        group: the ranks that have a share of the experts each, the first ones the first rank.
        algorithm: algorithm of the all-to-alls of rows.

    Raises:
        ValueError: it cannot be; the text follows the module's name.
    """
    values = [*module.parameters(), *module.buffers()]
    copied = deepcopy(module, {id(one): one for one in values})
    region, parts = ExpertRegion(group, algorithm), dict(copied.named_modules())
    owners, stacked, served = dict[str, int](), set[str](), set[str]()
    callers: dict[str, list[Bank]] = {}
    for name in names:
        part = parts.get(name)
        if part is None or not [*part.parameters()]:  # another stage has it
            continue
        inside = [f"{name}.{own}" for own, _ in part.named_parameters()]
        served |= set(inside)
        caller = caller_of(parts, name) if is_listed(part) else name
        if any(True for _ in stand_ins(parts[caller])):
            raise ValueError(
                f"has a batch norm in {caller or 'itself'}, where rows lie on other ranks or the "
                "code runs twice; take group or layer norm there"
            )
        if is_listed(part):
            bank, ranks = _list(region, name, part)
            for (number, expert), rank in zip(part._modules.items(), ranks, strict=True):
                own = expert.named_parameters() if expert is not None else ()
                owners |= {f"{name}.{number}.{inner}": rank for inner, _ in own}
            callers.setdefault(caller, []).append(bank)
        else:
            bank = _stack(region, name, part)
            tensors = [*part.named_parameters(), *part.named_buffers()]
            stacked |= {f"{name}.{own}" for own, one in tensors if one.shape[:1] == (bank.experts,)}
    for caller, banks in callers.items():
        around = parts[caller]
        around.forward = partial(region.around, banks, around.forward)
    copied.register_forward_pre_hook(region.begin)
    copied.register_forward_hook(region.begin)
    return ExpertShare(copied, region, {}, frozenset(served), owners, frozenset(stacked))


def _list(region: ExpertRegion, name: str, part: nn.Module) -> tuple[Bank, list[int]]:
    """The experts of a list, which communicate from now on, and the rank of each."""
    experts, group = list(part.children()), region.group
    every = [range(len(experts))[part_of(len(experts), r, group.size)] for r in range(group.size)]
    own = every[group.rank]
    for number, expert in enumerate(experts):
        expert.forward = partial(region.called, name, number, expert.forward)
    serve = partial(region.serve_list, [experts[number] for number in own])
    ranks = [rank for rank, numbers in enumerate(every) for _ in numbers]
    return Bank(name, part, len(experts), experts, own, serve), ranks


def _stack(region: ExpertRegion, name: str, part: nn.Module) -> Bank:
    """The experts of a stack, which communicates from now on."""
    count: Any = part.num_experts
    own = range(count)[region.group.share(count)]
    part.num_experts = len(own)  # type: ignore[assignment]
    serve = partial(region.serve_stack, part.forward)
    bank = Bank(name, part, count, [part], [0] * len(own), serve)
    part.forward = partial(region.stacked, bank)
    return bank


def _is_rows(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 0


def _leaves(given: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(given) if _is_rows(one)]
