"""Ways of rows to the experts of a torch module on other ranks, and back.

Rows travel by two all-to-alls forward and two backward, as in :mod:`mpitrain.nn.experts`.  Before
each way all ranks say which experts their code calls next.  The first of these are next, and ranks
whose code calls others, or none until the end of the pass, serve them without rows of their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from mpitrain.adapters.torch.arrays import as_array, as_tensor
from mpitrain.adapters.torch.checks.module_class import ImpureModule
from mpitrain.adapters.torch.modules.drawing import drawing, is_repeated
from mpitrain.adapters.torch.modules.regions import Region
from mpitrain.group import TensorGroup
from mpitrain.nn.experts import Dispatch

Counts = np.ndarray[Any, Any]


class ExpertRegion(Region):
    """Ranks that have some of a module's experts each.

    Attributes:
        algorithm: algorithm of the all-to-alls of rows.
        serves: whether this rank's experts run now, for rows of all ranks.
        banks: the experts, by module.
    """

    def __init__(self, group: TensorGroup, algorithm: str) -> None:
        super().__init__(group)
        self.algorithm, self.serves = algorithm, False
        self.banks: list[Bank] = []
        #: Results of the latest way of this pass; before it, a tensor whose gradient is wanted.
        self._last: list[torch.Tensor] = []

    def begin(self, given: Iterable[torch.Tensor]) -> None:
        self._last, self.repeats = [one for one in given if one.requires_grad][:1], False

    def end(self, outputs: Any) -> Any:
        """The outputs, whose backward pass goes through all ways; collective."""
        if not self.is_apart:
            self.meet()
        last, self._last = self._last, []
        return tree_map_only(torch.Tensor, partial(_tied, last), outputs)

    def settle(self, repeats: bool) -> None:
        if repeats and not self.is_apart:
            self.meet()
        else:
            self.check()

    def meet(
        self,
        own: "Bank | None" = None,
        rows: torch.Tensor | None = None,
        counts: Counts | Sequence[int] = (),
    ) -> torch.Tensor | None:
        """Results of a bank for rows, or None for no bank once no rank calls one; collective.

        Arguments are those of :meth:`Bank.exchange`.
        """
        number = len(self.banks) if own is None else self.banks.index(own)
        said = np.zeros(3 + max(bank.experts for bank in self.banks), int)
        said[0], said[3 : 3 + len(counts)] = number, counts
        said[1] = is_repeated()
        if rows is not None:
            said[2] = rows.shape[1]
        while True:
            self.check()
            every = self.group.all(said)
            first, self.repeats = int(every[:, 0].min()), self.repeats or bool(every[:, 1].any())
            if first == len(self.banks):
                return None
            bank = self.banks[first]
            told = np.where(every[:, :1] == first, every[:, 2 : 3 + bank.experts], 0)
            parameters = list(bank.module.parameters())
            sent = rows if rows is not None and bank is own else parameters[0].new_zeros(0, 0)
            found: torch.Tensor = _Way.apply(
                bank, told, torch.is_grad_enabled(), sent, *parameters, *self._last
            )
            if found.requires_grad and torch._C._current_graph_task_id() == -1:
                self._last = [found]  # so that all ranks go backward through ways in one order
            if bank is own:
                return found

    @contextmanager
    def serving(self) -> Iterator[None]:
        """This rank's experts run; numbers that they draw are a fault of the pass."""
        source = drawing()
        drawn = len(source.shapes) if source else 0
        with self.being(serves=True):
            yield
        if source and len(source.shapes) > drawn:
            source.fault = source.fault or "an expert draws random numbers for rows of many samples"


class Bank(ABC):
    """The experts of one module that ranks share.

    Attributes:
        region: the ranks.
        name: the module's full name.
        module: the module.
        experts: number of experts on all ranks.
        own: module of each of this rank's experts: one for each, or the one that has them all.
    """

    def __init__(
        self, region: ExpertRegion, name: str, module: nn.Module, every: Sequence[nn.Module]
    ) -> None:
        """``every``: module of each expert of all ranks."""
        self.region, self.name, self.module = region, name, module
        region.banks.append(self)
        self.experts, self.own = len(every), every[region.group.share(len(every))]

    @abstractmethod
    def serve(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Results of this rank's experts for the rows of each."""

    def exchange(self, rows: torch.Tensor | None, counts: Counts) -> torch.Tensor:
        """Results of the experts of all ranks for rows, which lie expert after expert; collective.

        Args:
            rows: the rows, (R, D); None: there are none.
            counts: rows of each expert; -1: it is called, and gets none.
        """
        region, like = self.region, next(self.module.parameters())
        if rows is None:
            rows = like.new_zeros(0, 0)
        if rows.dtype != like.dtype:
            raise ValueError(f"{self.name} gets rows of {rows.dtype} for numbers of {like.dtype}")
        if region.is_apart:
            own, ends = region.group.share(self.experts), counts.clip(0).cumsum()
            start, stop = (int(ends[n - 1]) if n else 0 for n in (own.start, own.stop))
            made = self.serve(rows[start:stop].split(counts.clip(0)[own].tolist()))
            return torch.cat([torch.zeros_like(rows[:start]), *made, torch.zeros_like(rows[stop:])])
        sent, counts = (rows, counts) if region.counts else (rows[:0], counts * 0)
        found = region.meet(self, sent, counts)
        assert found is not None
        zeros = rows.new_zeros(len(rows), found.shape[1])
        return found if region.counts else torch.cat([found, zeros])


def _tied(last: Sequence[torch.Tensor], one: torch.Tensor) -> torch.Tensor:
    """An output whose backward pass goes through the latest way, if there was one."""
    y: torch.Tensor = _Tie.apply(one, *last) if last and one.is_floating_point() else one
    return y


class _Way(torch.autograd.Function):
    """Rows to their experts and back; backward, gradients by the results, and by the rows."""

    @staticmethod
    def forward(
        ctx: Any, bank: Bank, told: Counts, graded: bool, rows: torch.Tensor,
        *others: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """``told``: width and counts of each rank."""
        region, counts = bank.region, told[:, 1:]
        sent = as_array(rows.contiguous(), region.xp)
        way = Dispatch(region.group, counts.clip(0), region.algorithm)
        if not len(sent):
            sent = region.xp.empty((0, int(told[:, 0].max())), sent.dtype)
        arrived = way.there(sent)
        # A checkpoint around the call keeps what other ranks' rows need: these may come to their
        # own checkpoints at other times.
        with torch.set_grad_enabled(graded), saved_tensors_hooks(_same, _same):
            given = [as_tensor(part).requires_grad_(graded) for part in arrived]
            made = bank.serve(given)
        region.check()
        back = way.back([as_array(part, region.xp) for part in made], sent)
        asked = np.asarray(counts[:, region.group.share(bank.experts)].any(axis=0))
        called = (one for is_asked, one in zip(asked, bank.own, strict=True) if is_asked)
        ctx.asked = {id(p) for one in called for p in one.parameters()}
        ctx.region, ctx.way, ctx.given, ctx.made = region, way, given, made
        ctx.repeats = region.repeats
        ctx.parameters = list(bank.module.parameters())
        return as_tensor(back)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ImpureModule("experts= has no gradients of gradients; leave it out")
        region, way, given, made = ctx.region, ctx.way, ctx.given, ctx.made
        ctx.given = ctx.made = None
        region.settle(ctx.repeats)
        sent = as_array(dy.contiguous(), region.xp)
        arrived = [as_tensor(part) for part in way.there(sent)]
        pairs = [(y, g) for y, g in zip(made, arrived, strict=True) if len(g) and y.requires_grad]
        trained = [p for p in ctx.parameters if p.requires_grad]
        wanted = [*given, *trained]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs:
            y, by = zip(*pairs, strict=True)
            found = torch.autograd.grad(y, wanted, by, allow_unused=True)
        slopes = [torch.zeros_like(x) if g is None else g for x, g in zip(given, found)]
        region.settle(ctx.repeats)
        rows = as_tensor(way.back([as_array(part, region.xp) for part in slopes], sent))
        by_parameter = {  # an expert that is called with no rows has gradients, too
            id(p): torch.zeros_like(p) if g is None and id(p) in ctx.asked else g
            for p, g in zip(trained, found[len(given) :], strict=True)
        }
        by_rows = rows if ctx.needs_input_grad[3] else None
        by_own = (by_parameter.get(id(p)) for p in ctx.parameters)
        rest = [None] * (len(ctx.needs_input_grad) - 4 - len(ctx.parameters))
        return None, None, None, by_rows, *by_own, *rest


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Tie(torch.autograd.Function):
    """Forward x; backward the gradient, and zeros for ``made``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype, ctx.device = made.shape, made.dtype, made.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy, torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
