"""Kinds of calls that move and reduce tensors.

A kind is a generator.  It draws a call and yields what must come of it, ``None`` if the call must
raise.  Then it gets the group and a :class:`~.draw.Lying`, makes the call, and returns its results,
tensors and objects, and its works.  One that yields nothing is no call of this group.
"""

from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist

from tests.torch_drawn.draw import Draw, Lying, Tensor

Drawn = Generator[list[Any] | None, tuple[Any, Lying], tuple[list[Any], Any]]
KINDS: dict[str, Callable[[Draw], Drawn]] = {}


def kind(draws: Callable[[Draw], Drawn]) -> Callable[[Draw], Drawn]:
    KINDS[draws.__name__] = draws
    return draws


def drawn(name: str, *which: Any) -> Any:
    """The :class:`Draw` that ``which`` names, a function that makes its call any number of times,
    and what must come of it; ``None``: the group has no such call."""

    def call(group: Any, lying: Lying) -> Any:
        next(steps := KINDS[name](Draw(*which)))
        try:
            steps.send((group, lying))
        except StopIteration as end:
            return end.value

    draw = Draw(*which)
    return next(((draw, call, expected) for expected in KINDS[name](draw)), None)


@kind
def all_reduce(d: Draw) -> Drawn:
    dtype = d.dtype()
    every = d.values(d.shape(), dtype)
    op, result = d.reduction(dtype)
    group, lying = yield result and [result(every)]
    tensor = lying.of(every[d.me], "leaf")
    return [tensor], dist.all_reduce(tensor, op, group, d.later)


@kind
def all_reduce_coalesced(d: Draw) -> Drawn:
    dtype = d.dtype()
    every = [d.values(d.shape(), dtype) for _ in range(d.all.randint(1, 4))]
    op, result = d.reduction(dtype)
    group, lying = yield result and [result(values) for values in every]
    tensors = [lying.of(values[d.me]) for values in every]
    return tensors, dist.all_reduce_coalesced(tensors, op, group, d.later)


@kind
def coalesced_sums(d: Draw) -> Drawn:
    dtype = d.dtype()
    every = [d.values(d.shape(), dtype) for _ in range(d.all.randint(1, 4))]
    op, result = d.reduction(dtype)
    if result is None:
        return  # an error in torch's manager leaves it begun
    group, lying = yield [result(values) for values in every]
    tensors = [lying.of(values[d.me]) for values in every]
    with dist._coalescing_manager(group, async_ops=d.later) as works:
        for tensor in tensors:
            dist.all_reduce(tensor, op, group)
    return tensors, works if d.later else None


@kind
def coalesced_gathers(d: Draw) -> Drawn:
    dtype = d.dtype()
    every = [d.values((2, *d.rows()), dtype) for _ in range(d.all.randint(1, 4))]
    expected = [torch.cat(values) for values in every]
    group, lying = yield expected
    outputs = [lying.room(one.shape, dtype) for one in expected]
    with dist._coalescing_manager(group, async_ops=d.later) as works:
        for values, output in zip(every, outputs):
            dist.all_gather_into_tensor(output, lying.of(values[d.me]), group)
    return outputs, works if d.later else None


@kind
def coalesced_reduce_scatters(d: Draw) -> Drawn:
    dtype = d.dtype()
    every = [d.values((2 * d.size, *d.rows()), dtype) for _ in range(d.all.randint(1, 4))]
    op, result = d.reduction(dtype)
    if result is None:
        return  # an error in torch's manager leaves it begun
    group, lying = yield [result(values)[2 * d.me :][:2] for values in every]
    outputs = [lying.room((2, *values[0].shape[1:]), dtype) for values in every]
    with dist._coalescing_manager(group, async_ops=d.later) as works:
        for values, output in zip(every, outputs):
            dist.reduce_scatter_tensor(output, lying.of(values[d.me]), op, group)
    return outputs, works if d.later else None


@kind
def broadcast(d: Draw) -> Drawn:
    every, root = d.values(d.shape(), d.dtype()), d.root()
    group, lying = yield [every[root]]
    tensor = lying.of(every[d.me], "leaf")
    named = {"group_src": root} if d.mine.random() < 0.5 else {"src": d.ranks[root]}
    return [tensor], dist.broadcast(tensor, group=group, async_op=d.later, **named)


@kind
def reduce(d: Draw) -> Drawn:
    dtype = d.dtype()
    every, root = d.values(d.shape(), dtype), d.root()
    op, result = d.reduction(dtype)
    group, lying = yield result and ([result(every)] if d.me == root else [])
    tensor = lying.of(every[d.me])
    work = dist.reduce(tensor, d.ranks[root], op, group, d.later)
    return [tensor] if d.me == root else [], work


@kind
def all_gather(d: Draw) -> Drawn:
    """Blocks may be unequal."""
    dtype, shapes = d.dtype(), [d.shape() for _ in d.ranks]
    if d.all.random() < 0.6:
        shapes = shapes[:1] * d.size
    d.with_gloo &= len({*shapes}) == 1
    every = [d.one(member, shape, dtype) for member, shape in enumerate(shapes)]
    group, lying = yield every
    outputs = _parts(d, lying, shapes, dtype)
    return outputs, dist.all_gather(outputs, lying.of(every[d.me]), group, d.later)


@kind
def all_gather_into_tensor(d: Draw) -> Drawn:
    dtype, shape = d.dtype(), (2, *d.rows())
    every = d.values(shape, dtype)
    stacks = d.all.random() < 0.3
    d.with_gloo &= not stacks
    expected = torch.stack(every) if stacks else torch.cat(every)
    group, lying = yield [expected]
    output = lying.room(expected.shape, dtype)
    block = d.me if d.mine.random() < 0.7 else d.mine.randrange(d.size)
    source = lying.block(output, block * every[0].numel(), every[d.me])
    return [output], dist.all_gather_into_tensor(output, source, group, d.later)


@kind
def all_gather_coalesced(d: Draw) -> Drawn:
    dtype = d.dtype()
    every = [d.values(d.shape(), dtype) for _ in range(d.all.randint(1, 3))]
    group, lying = yield [values[member] for member in range(d.size) for values in every]
    outputs = [[lying.room(values[0].shape, dtype) for values in every] for _ in d.ranks]
    sources = [lying.of(values[d.me]) for values in every]
    work = dist.all_gather_coalesced(outputs, sources, group, d.later)
    return [tensor for parts in outputs for tensor in parts], work


@kind
def gather(d: Draw) -> Drawn:
    dtype, shape, root = d.dtype(), d.shape(), d.root()
    every = d.values(shape, dtype)
    group, lying = yield every if d.me == root else []
    outputs = _parts(d, lying, [shape] * d.size, dtype) if d.me == root else None
    work = dist.gather(lying.of(every[d.me]), outputs, d.ranks[root], group, d.later)
    return outputs or [], work


@kind
def scatter(d: Draw) -> Drawn:
    dtype, shape, root = d.dtype(), d.shape(), d.root()
    every = d.values(shape, dtype)
    group, lying = yield [every[d.me]]
    output = lying.room(shape, dtype)
    inputs = [lying.of(values) for values in every] if d.me == root else None
    return [output], dist.scatter(output, inputs, d.ranks[root], group, d.later)


@kind
def reduce_scatter(d: Draw) -> Drawn:
    """Blocks may be unequal."""
    dtype, shapes = d.dtype(), [d.shape() for _ in d.ranks]
    if d.all.random() < 0.6:
        shapes = shapes[:1] * d.size
    d.with_gloo &= len({*shapes}) == 1
    every = [d.values(shape, dtype) for shape in shapes]
    op, result = d.reduction(dtype)
    group, lying = yield result and [result(every[d.me])]
    output = lying.room(shapes[d.me], dtype)
    parts = [lying.of(block[d.me]) for block in every]
    return [output], dist.reduce_scatter(output, parts, op, group, d.later)


@kind
def reduce_scatter_tensor(d: Draw) -> Drawn:
    dtype, shape = d.dtype(), (2 * d.size, *d.rows())
    every = d.values(shape, dtype)
    op, result = d.reduction(dtype)
    group, lying = yield result and [result(every)[2 * d.me :][:2]]
    source = lying.of(every[d.me])
    output = lying.room((2, *shape[1:]), dtype)
    if lying.rng is not None and source.is_contiguous() and d.mine.random() < 0.4:
        output = source[d.mine.randrange(2 * d.size - 1) :][:2]
    return [output], dist.reduce_scatter_tensor(output, source, op, group, d.later)


@kind
def all_to_all(d: Draw) -> Drawn:
    d.with_gloo = False  # it has none
    dtype = d.dtype()
    shapes = [[d.shape() for _ in d.ranks] for _ in d.ranks]
    if d.all.random() < 0.5:
        shapes = [[shapes[0][0]] * d.size] * d.size
    every = [[d.one(i, shape, dtype) for shape in row] for i, row in enumerate(shapes)]
    group, lying = yield [row[d.me] for row in every]
    outputs = _parts(d, lying, [row[d.me] for row in shapes], dtype)
    inputs = [lying.of(block) for block in every[d.me]]
    return outputs, dist.all_to_all(outputs, inputs, group, d.later)


@kind
def all_to_all_single(d: Draw) -> Drawn:
    """Rows go in blocks, equal ones with splits or without, as each rank draws."""
    dtype, row, rows = d.dtype(), d.rows(), drawn_splits(d)
    every = [d.one(i, (sum(sent), *row), dtype) for i, sent in enumerate(rows)]
    got = [sent[d.me] for sent in rows]
    expected = torch.cat([t.split(sent)[d.me] for t, sent in zip(every, rows)])
    group, lying = yield [expected]
    output, source = lying.room(expected.shape, dtype), lying.of(every[d.me])
    out, own = (spelled(d, splits) for splits in (got, rows[d.me]))
    return [output], dist.all_to_all_single(output, source, out, own, group, d.later)


def _parts(d: Draw, lying: Lying, shapes: Any, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of their own, or views of one."""
    if lying.rng is None or d.mine.random() < 0.6:
        return [lying.room(shape, dtype) for shape in shapes]
    items = [torch.Size(shape).numel() for shape in shapes]
    whole = torch.empty(sum(items), dtype=dtype)
    return [part.view(shape) for part, shape in zip(whole.split(items), shapes)]


def drawn_splits(d: Draw) -> list[list[int]]:
    """Rows from each member to each: one number, one of each pair, or any."""
    way = d.all.choice(("equal", "equal", "by sender", "any"))
    if way == "equal":
        return [[d.all.randint(0, 3)] * d.size] * d.size
    rows = [[d.all.randint(0, 3) for _ in d.ranks] for _ in d.ranks]
    return [row[:1] * d.size for row in rows] if way == "by sender" else rows


def spelled(d: Draw, splits: list[int]) -> list[int] | None:
    """Equal splits may be left out."""
    return None if len({*splits}) == 1 and d.mine.random() < 0.5 else splits
