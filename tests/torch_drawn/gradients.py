"""Kinds of calls that return their results, and those with gradients."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as nn

from tests.torch_drawn.calls import Drawn, drawn_splits, kind, spelled
from tests.torch_drawn.draw import Draw, Tensor, reduced

_SUMS = ("sum", "avg", "min", "max", "product")
_waited = functional.wait_tensor


def _reduction(d: Draw, dtype: torch.dtype) -> str:
    is_bound = dtype.is_complex or dtype == torch.bool
    found = "sum" if is_bound else d.all.choice(_SUMS)
    d.with_gloo &= found != "avg"
    return found


@kind
def functional_all_reduce(d: Draw) -> Drawn:
    every, op = d.values(d.shape(), dtype := d.dtype()), _reduction(d, dtype)
    group, lying = yield [reduced(op.upper(), every), every[d.me]]
    source = lying.of(every[d.me], "conjugate")
    return [_waited(functional.all_reduce(source, op, group)), source], None


@kind
def functional_all_reduce_coalesced(d: Draw) -> Drawn:
    dtype = d.dtype()
    every = [d.values(d.shape(), dtype) for _ in range(d.all.randint(1, 3))]
    op = _reduction(d, dtype)
    group, lying = yield [reduced(op.upper(), values) for values in every]
    sources = [lying.of(values[d.me], "conjugate") for values in every]
    return [*map(_waited, functional.all_reduce_coalesced(sources, op, group))], None


@kind
def functional_broadcast(d: Draw) -> Drawn:
    every, root = d.values(d.shape(), d.dtype()), d.root()
    group, lying = yield [every[root]]
    return [_waited(functional.broadcast(lying.of(every[d.me], "conjugate"), root, group))], None


@kind
def functional_all_gather(d: Draw) -> Drawn:
    every = d.values((2, 3, *d.rows()), d.dtype())
    axis = d.all.randrange(2)
    group, lying = yield [torch.cat(every, axis)]
    found = functional.all_gather_tensor(lying.of(every[d.me], "conjugate"), axis, group)
    return [_waited(found)], None


@kind
def functional_all_gather_coalesced(d: Draw) -> Drawn:
    dtype = d.dtype()
    every = [d.values((2, *d.rows()), dtype) for _ in range(d.all.randint(1, 3))]
    group, lying = yield [torch.cat(values) for values in every]
    sources = [lying.of(values[d.me], "conjugate") for values in every]
    return [*map(_waited, functional.all_gather_into_tensor_coalesced(sources, group))], None


@kind
def functional_reduce_scatter(d: Draw) -> Drawn:
    axis = d.all.randrange(2)
    shape = (2 * d.size, 3) if axis == 0 else (3, 2 * d.size)
    every, op = d.values((*shape, *d.rows()), dtype := d.dtype()), _reduction(d, dtype)
    expected = reduced(op.upper(), every).split(2, axis)[d.me]
    group, lying = yield [expected]
    found = functional.reduce_scatter_tensor(lying.of(every[d.me], "conjugate"), op, axis, group)
    return [_waited(found)], None


@kind
def functional_reduce_scatter_coalesced(d: Draw) -> Drawn:
    dtype = d.dtype()
    every = [d.values((2 * d.size, *d.rows()), dtype) for _ in range(d.all.randint(1, 3))]
    op = _reduction(d, dtype)
    group, lying = yield [reduced(op.upper(), values)[2 * d.me :][:2] for values in every]
    sources = [lying.of(values[d.me], "conjugate") for values in every]
    found = functional.reduce_scatter_tensor_coalesced(sources, op, [0] * len(every), group)
    return [*map(_waited, found)], None


@kind
def functional_all_to_all(d: Draw) -> Drawn:
    row, rows = d.rows(), drawn_splits(d)
    dtype = d.dtype()
    every = [d.one(i, (sum(sent), *row), dtype) for i, sent in enumerate(rows)]
    got = [sent[d.me] for sent in rows]
    leaves_out = rows[d.me] == got and spelled(d, got) is None
    group, lying = yield [torch.cat([t.split(sent)[d.me] for t, sent in zip(every, rows)])]
    splits = (None, None) if leaves_out else (got, rows[d.me])
    found = functional.all_to_all_single(lying.of(every[d.me], "conjugate"), *splits, group)
    return [_waited(found)], None


@kind
def functional_permute(d: Draw) -> Drawn:
    every, order = d.values((6,), d.dtype()), d.all.sample(range(d.size), d.size)
    group, lying = yield [every[order.index(d.me)]]
    found = functional.permute_tensor(lying.of(every[d.me], "conjugate"), order, group)
    return [_waited(found)], None


def _backward(d: Draw, run: Any, mine: Tensor, weights: Any, expected: Any, slope: Tensor) -> Drawn:
    """A call on this rank's tensor; the loss is the product of results and weights."""
    group, lying = yield [*expected, slope]
    source = lying.of(mine).requires_grad_()
    with warnings.catch_warnings(action="ignore"):  # some are deprecated
        found = run(source, group)
        results = [_waited(f) for f in (found if isinstance(found, list | tuple) else [found])]
        sum((f * w).sum() for f, w in zip(results, weights)).backward()
    return [*results, source.grad], None


def _reals(d: Draw, shape: Any) -> tuple[list[Tensor], torch.dtype]:
    dtype = d.all.choice((torch.float32, torch.float64))
    return d.values(shape, dtype), dtype


@kind
def gradient_of_all_reduce(d: Draw) -> Drawn:
    every, dtype = _reals(d, shape := (2, *d.rows()))
    weights, is_new = d.values(shape, dtype), d.all.random() < 0.5
    op = "SUM" if is_new else d.all.choice(("SUM", "AVG"))
    d.with_gloo &= op == "SUM"

    def run(source: Tensor, group: Any) -> Any:
        if is_new:
            return functional.all_reduce(source, "sum", group)
        return nn.all_reduce(source * 1, getattr(dist.ReduceOp, op), group)

    total, slope = reduced(op, every), reduced(op, weights)
    return _backward(d, run, every[d.me], [weights[d.me]], [total], slope)


@kind
def gradient_of_broadcast(d: Draw) -> Drawn:
    if d.ranks != list(range(d.size)):
        return  # torch takes the root's number in the world for its number in the group
    every, dtype = _reals(d, shape := (2, *d.rows()))
    weights, root = d.values(shape, dtype), d.root()
    slope = sum(weights) if d.me == root else torch.zeros(shape, dtype=dtype)

    def run(source: Tensor, group: Any) -> Any:
        return nn.broadcast(source, d.ranks[root], group)

    return (yield from _backward(d, run, every[d.me], [weights[d.me]], [every[root]], slope))


@kind
def gradient_with_a_root(d: Draw) -> Drawn:
    """Results that others than the root are given of a reduction or a gather count nothing."""
    if d.ranks != list(range(d.size)):
        return  # as for a broadcast
    every, dtype = _reals(d, shape := (2 * d.size, *d.rows()))
    weights, root = d.values(shape, dtype), d.root()
    way, d.with_gloo = d.all.choice(("reduce", "gather", "scatter")), False
    counts = d.me == root or way == "scatter"

    def run(source: Tensor, group: Any) -> Any:
        if way == "scatter":
            return nn.scatter([*source.split(2)], root, group)
        every = nn.gather(source, root, group) if way == "gather" else None
        found = every or [nn.reduce(source * 1, root, group=group)]
        return [one if counts else 0 * one for one in found]

    if way == "gather":
        expected, slope = every, weights[d.me]
    elif way == "reduce":
        expected, weights, slope = [sum(every)], weights[root:], weights[root]
    else:
        expected, slope = [every[root].split(2)[d.me]], weights[root] * (d.me == root)
        weights = [weights[root].split(2)[d.me]]
    expected = [one if counts else 0 * one for one in expected]
    return (yield from _backward(d, run, every[d.me], weights, expected, slope))


@kind
def gradient_of_all_gather(d: Draw) -> Drawn:
    every, dtype = _reals(d, shape := (2, *d.rows()))
    weights = [d.values(shape, dtype) for _ in d.ranks]  # of each block, for each rank
    slope, is_new = sum(weights[d.me]), d.all.random() < 0.5
    d.with_gloo = d.ranks == list(range(d.size))  # as for a broadcast, over Gloo alone

    def run(source: Tensor, group: Any) -> Any:
        if is_new:
            return list(_waited(functional.all_gather_tensor_autograd(source, 0, group)).split(2))
        return nn.all_gather(source, group)

    return _backward(d, run, every[d.me], [w[d.me] for w in weights], every, slope)


@kind
def gradient_of_reduce_scatter(d: Draw) -> Drawn:
    every, dtype = _reals(d, (2 * d.size, *(row := d.rows())))
    weights, is_new = d.values((2, *row), dtype), d.all.random() < 0.5

    def run(source: Tensor, group: Any) -> Any:
        if is_new:
            return functional.reduce_scatter_tensor_autograd(source, "sum", 0, group)
        return nn.reduce_scatter(source.new_empty(2, *row), list(source.split(2)), group=group)

    total = sum(every)[2 * d.me :][:2]
    return _backward(d, run, every[d.me], [weights[d.me]], [total], torch.cat(weights))


@kind
def gradient_of_all_to_all(d: Draw) -> Drawn:
    rows, row = drawn_splits(d), d.rows()
    dtype, way = d.all.choice((torch.float32, torch.float64)), d.all.choice(("new", "one", "list"))
    d.with_gloo &= way != "list"  # it has none
    every = [d.one(i, (sum(sent), *row), dtype) for i, sent in enumerate(rows)]
    columns = [list(column) for column in zip(*rows)]
    weights = [d.one(i, (sum(got), *row), dtype) for i, got in enumerate(columns)]
    got = columns[d.me]
    leaves_out = rows[d.me] == got and spelled(d, got) is None
    splits = (None, None) if leaves_out else (got, rows[d.me])

    def run(source: Tensor, group: Any) -> Any:
        if way == "new":
            return functional.all_to_all_single_autograd(source, got, rows[d.me], group)
        if way == "list":
            outputs = [source.new_empty(n, *row) for n in got]
            return torch.cat(nn.all_to_all(outputs, [*source.split(rows[d.me])], group))
        return nn.all_to_all_single(source.new_empty(sum(got), *row), source, *splits, group)

    found = torch.cat([t.split(sent)[d.me] for t, sent in zip(every, rows)])
    slope = torch.cat([w.split(c)[d.me] for w, c in zip(weights, columns)])
    return _backward(d, run, every[d.me], [weights[d.me]], [found], slope)
