"""Kinds of calls: objects, messages, barriers, groups, and calls that cannot be."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.torch_drawn.calls import Drawn, kind
from tests.torch_drawn.draw import Draw


@kind
def all_gather_object(d: Draw) -> Drawn:
    every = [_thing(d, member) for member in range(d.size)]
    group, _ = yield every
    found: list[Any] = [None] * d.size
    dist.all_gather_object(found, every[d.me], group)
    return found, None


@kind
def gather_object(d: Draw) -> Drawn:
    every, root = [_thing(d, member) for member in range(d.size)], d.root()
    group, _ = yield every if d.me == root else []
    found: list[Any] | None = [None] * d.size if d.me == root else None
    dist.gather_object(every[d.me], found, d.ranks[root], group)
    return found or [], None


@kind
def scatter_object_list(d: Draw) -> Drawn:
    every, root = [_thing(d, member) for member in range(d.size)], d.root()
    group, _ = yield [every[d.me]]
    found: list[Any] = [None]
    given = every if d.me == root else None
    dist.scatter_object_list(found, given, d.ranks[root], group)
    return found, None


@kind
def broadcast_object_list(d: Draw) -> Drawn:
    every, root = [_thing(d, member) for member in range(3)], d.root()
    group, _ = yield every
    found = list(every) if d.me == root else [None] * 3
    dist.broadcast_object_list(found, d.ranks[root], group)
    return found, None


@kind
def send_and_recv(d: Draw) -> Drawn:
    """Each sends to the next."""
    if d.size == 1:
        return
    every, dtype = d.values(shape := d.shape(), dtype := d.dtype()), dtype
    after, before = d.ranks[(d.me + 1) % d.size], d.ranks[d.me - 1]
    group, lying = yield [every[d.me - 1], every[d.me]]
    source, output = lying.of(every[d.me]), lying.room(shape, dtype)
    steps = [
        lambda: dist.send(source, after, group, d.number),
        lambda: dist.recv(output, before, group, d.number),
    ]
    for step in steps if d.me == 0 else steps[::-1]:
        step()
    return [output, source], None


@kind
def isend_and_irecv(d: Draw) -> Drawn:
    if d.size == 1:
        return
    every, dtype = d.values(shape := d.shape(), dtype := d.dtype()), dtype
    after, before = d.ranks[(d.me + 1) % d.size], d.ranks[d.me - 1]
    group, lying = yield [every[d.me - 1]]
    output, works = lying.room(shape, dtype), []
    steps = [
        lambda: dist.isend(lying.of(every[d.me]), after, group, d.number),
        lambda: dist.irecv(output, before, group, d.number),
    ]
    for step in d.mine.sample(steps, 2):
        works.append(step())
    return [output], works


@kind
def batch_isend_irecv(d: Draw) -> Drawn:
    """Each sends to all others, and receives from them in an order of its own."""
    if d.size == 1:
        return
    shapes, dtype = [d.shape() for _ in d.ranks], d.dtype()
    every = [d.one(member, shape, dtype) for member, shape in enumerate(shapes)]
    others = [member for member in range(d.size) if member != d.me]
    group, lying = yield [every[member] for member in others]
    outputs = {member: lying.room(shapes[member], dtype) for member in others}
    steps = [
        dist.P2POp(op, tensor, d.ranks[member], group, d.number)
        for member in others
        for op, tensor in ((dist.isend, lying.of(every[d.me])), (dist.irecv, outputs[member]))
    ]
    return list(outputs.values()), dist.batch_isend_irecv(d.mine.sample(steps, len(steps)))


@kind
def recv_from_any(d: Draw) -> Drawn:
    if d.size == 1:
        return
    every, dtype = d.values(shape := d.shape(), dtype := d.dtype()), dtype
    d.with_gloo &= every[0].numel() > 0
    group, lying = yield [] if d.me else every[1:]
    if d.me:
        dist.send(lying.of(every[d.me]), d.ranks[0], group, d.number)
        return [], None
    found = {}
    for _ in d.ranks[1:]:
        output = lying.room(shape, dtype)
        found[dist.recv(output, None, group, d.number)] = output
    return [found[rank] for rank in d.ranks[1:]], None


@kind
def send_object_list(d: Draw) -> Drawn:
    if d.size == 1:
        return
    every = [_thing(d, member) for member in range(2)]
    group, _ = yield every if d.me == d.size - 1 else []
    if d.me == 0:
        dist.send_object_list(every, d.ranks[-1], group)
    elif d.me == d.size - 1:
        found: list[Any] = [None] * 2
        dist.recv_object_list(found, d.ranks[0], group)
        return found, None
    return [], None


@kind
def barrier(d: Draw) -> Drawn:
    group, _ = yield []
    return [], dist.barrier(group, d.later)


@kind
def monitored_barrier(d: Draw) -> Drawn:
    group, _ = yield []
    group.monitored_barrier(timedelta(seconds=60), wait_all_ranks=d.all.random() < 0.5)
    return [], None


@kind
def sparse_all_reduce(d: Draw) -> Drawn:
    every = d.values((4, 3), d.all.choice((torch.float32, torch.int64)))
    expected = sum(every)
    group, _ = yield [expected]
    tensor = every[d.me].to_sparse()
    dist.all_reduce(tensor, group=group)
    return [tensor.to_dense()], None


@kind
def group_for_a_call(d: Draw) -> Drawn:
    """A group that only its members make, and end.  torch names it by how many groups a rank is in,
    and Gloo's ranks wait for one another under these names."""
    d.with_gloo = False
    members = sorted(d.all.sample(range(d.size), d.all.randint(1, d.size)))
    ranks, every = [d.ranks[m] for m in members], d.values((3,), torch.int64)
    group, lying = yield [sum(every[m] for m in members)] if d.me in members else []
    if d.me not in members:
        return [], None
    made = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
    dist.all_reduce(tensor := lying.of(every[d.me]), group=made)
    dist.destroy_process_group(made)
    return [tensor], None


@kind
def wrong_calls(d: Draw) -> Drawn:
    """Calls of all ranks that cannot be.  Gloo begins some, and its next call may wait for ever."""
    d.with_gloo = False
    two, size = torch.ones(2 * d.size), d.size
    calls: list[Callable[[Any], Any]] = [
        lambda group: dist.all_to_all_single(two.clone(), two, [2] * size, [1] * size, group),
        lambda group: dist.all_to_all_single(two.clone(), two, [2] * (size + 1), None, group),
        lambda group: dist.all_gather([two.clone()] * (size + 1), two, group),
        lambda group: dist.all_gather_into_tensor(torch.ones(2 * size + 1), torch.ones(2), group),
        lambda group: dist.all_gather_into_tensor(torch.ones(2 * size).int(), torch.ones(2), group),
        lambda group: dist.reduce_scatter_tensor(torch.ones(3), two, group=group),
        lambda group: dist.reduce_scatter(torch.ones(2), [two] * (size + 1), group=group),
        lambda group: dist.all_reduce([two], group=group),
        lambda group: dist.broadcast(two, 99, group),
        lambda group: dist.gather(two, [two.clone()] * (size + 1), d.ranks[d.me], group),
        lambda group: dist.scatter(two, [two.clone()] * (size + 1), d.ranks[d.me], group),
        lambda group: dist.all_reduce(two.to("meta"), group=group),
        lambda group: dist.all_reduce_coalesced([two, two.int()], group=group),
    ]
    chosen = d.all.choice(calls)
    group, _ = yield None
    chosen(group)
    return [], None


def _thing(d: Draw, member: int) -> Any:
    """An object of another kind and length for each member."""
    rng = d.of(member + 100 * d.all.randrange(9))
    things = [None, rng.random(), "word" * rng.randrange(9), {"a": [1, (2, rng.random())]}]
    return rng.choice([*things, b"x" * rng.randrange(1 << 17), ["y"] * rng.randrange(500)])
