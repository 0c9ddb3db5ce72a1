"""Ways of rows to the experts of a torch module on other ranks, and back.

Rows travel by two all-to-alls forward and two backward, as in :mod:`mpitrain.nn.experts`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from mpitrain.adapters.torch.arrays import as_array, as_tensor
from mpitrain.adapters.torch.modules.drawing import drawing
from mpitrain.adapters.torch.modules.regions import Region
from mpitrain.group import TensorGroup
from mpitrain.nn.experts import Dispatch

Counts = np.ndarray[Any, Any]


class ExpertRegion(Region):
    """Ranks that have some of a module's experts each.

    Attributes:
        algorithm: algorithm of the all-to-alls of rows.
        serves: whether this rank's experts run now, for rows of all ranks.
        last: results that came back on the latest way of this pass.
    """

    def __init__(self, group: TensorGroup, algorithm: str) -> None:
        super().__init__(group)
        self.algorithm, self.serves = algorithm, False
        self.last: torch.Tensor | None = None

    def begin(self, *_: Any) -> None:
        self.last = None

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
        self.experts, self.own = len(every), every[region.group.share(len(every))]

    @abstractmethod
    def serve(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Results of this rank's experts for the rows of each."""

    def exchange(
        self, rows: torch.Tensor | None, counts: Counts, anchors: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Results of the experts of all ranks for rows, which lie expert after expert; collective.

        Args:
            rows: the rows, (R, D); None: there are none.
            counts: rows of each expert, as :class:`Dispatch` takes them.
            anchors: tensors before the rows, whose gradients wait for those of the rows.
        """
        region, parameters = self.region, list(self.module.parameters())
        if rows is None:
            rows = parameters[0].new_zeros(0, 0)
        if rows.dtype != parameters[0].dtype:
            raise ValueError(
                f"{self.name} gets rows of {rows.dtype} for numbers of {parameters[0].dtype}"
            )
        if region.is_apart:
            own, ends = region.group.share(self.experts), counts.clip(0).cumsum()
            start, stop = (int(ends[n - 1]) if n else 0 for n in (own.start, own.stop))
            made = self.serve(rows[start:stop].split(counts.clip(0)[own].tolist()))
            return torch.cat([torch.zeros_like(rows[:start]), *made, torch.zeros_like(rows[stop:])])
        sent, counts = (rows, counts) if region.counts else (rows[:0], counts * 0)
        after = [] if region.last is None else [region.last]
        found: torch.Tensor = _Way.apply(
            self, counts, torch.is_grad_enabled(), sent, *parameters, *anchors, *after
        )
        if found.requires_grad and torch._C._current_graph_task_id() == -1:
            region.last = found  # so that all ranks go backward through these ways in one order
        zeros = rows.new_zeros(len(rows), found.shape[1])
        return found if region.counts else torch.cat([found, zeros])


def tied(found: Any, made: torch.Tensor) -> Any:
    """Results whose backward pass goes through ``made``, even if no row was sent."""
    if not made.requires_grad:
        return found

    def one_tied(one: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Tie.apply(one, made) if one.is_floating_point() else one
        return y

    return tree_map_only(torch.Tensor, one_tied, found)


class _Way(torch.autograd.Function):
    """Rows to their experts and back; backward, gradients by the results, and by the rows."""

    @staticmethod
    def forward(
        ctx: Any, bank: Bank, counts: Counts, graded: bool, rows: torch.Tensor,
        *others: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        region = bank.region
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
        asked = (one for is_asked, one in zip(way.asked, bank.own, strict=True) if is_asked)
        ctx.asked = {id(p) for one in asked for p in one.parameters()}
        ctx.region, ctx.way, ctx.given, ctx.made = region, way, given, made
        ctx.parameters = list(bank.module.parameters())
        return as_tensor(back)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        region, way, given, made = ctx.region, ctx.way, ctx.given, ctx.made
        ctx.given = ctx.made = None
        region.check()
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
        region.check()
        rows = as_tensor(way.back([as_array(part, region.xp) for part in slopes], sent))
        by_parameter = {  # an expert that is called with no rows has gradients, too
            id(p): torch.zeros_like(p) if g is None and id(p) in ctx.asked else g
            for p, g in zip(trained, found[len(given) :], strict=True)
        }
        by_rows = rows if ctx.needs_input_grad[3] else None
        rest = [None] * (len(ctx.needs_input_grad) - 4 - len(ctx.parameters))
        return None, None, None, by_rows, *(by_parameter.get(id(p)) for p in ctx.parameters), *rest


class _Tie(torch.autograd.Function):
    """Forward x; backward the gradient, and zeros for ``made``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype, ctx.device = made.shape, made.dtype, made.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy, torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
