"""Gradients of collectives of torch tensors: those of one process that has all ranks' tensors."""

import re

import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import torch.distributed.nn.functional as nn  # noqa: E402

from collectives.torch import differentiable  # noqa: E402

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.quick_on(2, 3),
    pytest.mark.at_most(4),
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]
P, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
LAST, NEXT, BEFORE = P - 1, (RANK + 1) % P, (RANK - 1) % P
EQUAL = [(2 * P, 3)] * P
UNEQUAL = [(r + 1, 3) for r in range(P)]
#: Rows of the block that each rank sends to rank r.
ROWS = [r + 1 for r in range(P)]
FOR_BLOCKS = [(sum(ROWS), 3)] * P


def drawn(seed, shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def loss(rank, outputs):
    """A rank's loss, which weighs each number of each output differently."""
    terms = (drawn(1000 + 10 * rank + i, out.shape) * out**2 for i, out in enumerate(outputs))
    return sum(term.sum() for term in terms)


def blocks(x, sizes=None):
    return list(x.split(sizes)) if sizes else list(x.chunk(P))


def exchanged(xs, sizes=None):
    """The blocks that each rank gets in an all-to-all."""
    return [[blocks(x, sizes)[r] for x in xs] for r in range(P)]


def only_on_last(r, outputs):
    return outputs if r == LAST else [0 * out for out in outputs]


def room(rows):
    return torch.empty(rows, 3, dtype=torch.float64)


MEAN = lambda xs: [[sum(xs) / P]] * P  # noqa: E731
ALL = lambda xs: [list(xs)] * P  # noqa: E731
UNEQUAL_BLOCK = lambda xs: [[blocks(sum(xs), ROWS)[r]] for r in range(P)]  # noqa: E731
#: What this rank calls on its tensor, all ranks' results by one process, and the ranks' shapes.
CALLS = {
    "nn.all_reduce, mean": (lambda x: [nn.all_reduce(x * 1, dist.ReduceOp.AVG)], MEAN, EQUAL),
    "nn.all_to_all, unequal": (
        lambda x: nn.all_to_all([room(ROWS[RANK]) for _ in range(P)], blocks(x, ROWS)),
        lambda xs: exchanged(xs, ROWS), FOR_BLOCKS),
    "nn.reduce": (
        lambda x: only_on_last(RANK, [nn.reduce(x * 1, LAST)]),
        lambda xs: [only_on_last(r, [sum(xs)]) for r in range(P)], EQUAL),
    "nn.gather": (
        lambda x: only_on_last(RANK, nn.gather(x, LAST)),
        lambda xs: [only_on_last(r, list(xs)) for r in range(P)], EQUAL),
    "nn.scatter": (
        lambda x: [nn.scatter(blocks(x), LAST)],
        lambda xs: [[blocks(xs[LAST])[r]] for r in range(P)], EQUAL),
    "all_gather, unequal": (differentiable.all_gather, ALL, UNEQUAL),
    "reduce_scatter, unequal": (
        lambda x: [differentiable.reduce_scatter(blocks(x, ROWS))], UNEQUAL_BLOCK, FOR_BLOCKS),
    "reduce_scatter of all_gather": (
        lambda x: [differentiable.reduce_scatter([p**2 for p in differentiable.all_gather(x)])],
        lambda xs: [[P * x**2] for x in xs], UNEQUAL),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_one_process(name):
    call, alone, shapes = CALLS[name]
    every = [drawn(r, shapes[r]).requires_grad_() for r in range(P)]
    expected = alone(every)
    sum(loss(r, outputs) for r, outputs in enumerate(expected)).backward()
    x = every[RANK].detach().clone().requires_grad_()
    found = call(x)
    for one, other in zip(found, expected[RANK], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    loss(RANK, found).backward()
    gradient = every[RANK].grad
    if gradient is None:  # nothing depends on this rank's tensor
        gradient = torch.zeros_like(x)
    torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-12)


def test_second_derivatives_of_unequal_blocks():
    every = [drawn(r, UNEQUAL[r]).requires_grad_() for r in range(P)]
    alone = P * sum((x**3).sum() for x in every)
    (first,) = torch.autograd.grad(alone, every[RANK], create_graph=True)
    x = every[RANK].detach().clone().requires_grad_()
    mine = sum((part**3).sum() for part in differentiable.all_gather(x))
    (found,) = torch.autograd.grad(mine, x, create_graph=True)
    torch.testing.assert_close(found, first)
    (found**2).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad((first**2).sum(), every[RANK])[0])


@pytest.mark.parametrize("receives_first", [False, True])
@pytest.mark.parametrize("size", [3, 100_000])
def test_messages_round_a_ring(size, receives_first):
    every = [drawn(r, (size,)).requires_grad_() for r in range(P)]
    sum((every[r - 1] ** 2 * every[r]).sum() for r in range(P)).backward()
    x = every[RANK].detach().clone().requires_grad_()
    if receives_first and RANK % 2:
        other = differentiable.recv(x, BEFORE)
        sent = differentiable.send(x, NEXT)
    else:
        sent = differentiable.send(x, NEXT)
        other = differentiable.recv(x, BEFORE)
    assert torch.equal(other, every[BEFORE])
    ((other**2 * x).sum() + sent).backward()
    torch.testing.assert_close(x.grad, every[RANK].grad)


def test_messages_down_a_chain_with_a_broadcast_of_the_loss():
    """Rank r multiplies by its weight what rank r-1 sends; two messages at once have tags."""
    weight = torch.tensor(2.0 + RANK, dtype=torch.float64, requires_grad=True)
    values = torch.ones(4, dtype=torch.float64), torch.full((2,), 3.0, dtype=torch.float64)
    if RANK:
        second = differentiable.recv(values[1], BEFORE, tag=1)
        values = differentiable.recv(values[0], BEFORE, tag=0), second
    values = [weight * value for value in values]
    if RANK == LAST:
        total = sum(value.sum() for value in values)
    else:
        total = sum(differentiable.send(v, NEXT, tag=tag) for tag, v in enumerate(values))
    total.backward()
    every = [2.0 + r for r in range(P)]
    product = torch.tensor(every, dtype=torch.float64).prod()
    torch.testing.assert_close(weight.grad, 10 * product / every[RANK])


def test_a_tensor_may_change_while_it_is_sent():
    mine = torch.full((200_000,), float(RANK))
    with torch.no_grad():
        differentiable.send(mine, NEXT)
        mine.fill_(-1.0)
        assert differentiable.recv(mine, BEFORE).unique().tolist() == [BEFORE]


def test_what_has_no_gradient_sends_none():
    whole = torch.tensor([RANK])
    with torch.no_grad():
        real = torch.ones(2, requires_grad=True)
        sent, got = differentiable.send(real, NEXT), differentiable.recv(real, BEFORE)
    assert not sent.requires_grad and not got.requires_grad
    sent, got = differentiable.send(whole, NEXT), differentiable.recv(whole, BEFORE)
    assert not sent.requires_grad and not got.requires_grad and got.item() == BEFORE


@pytest.mark.parametrize("call", [differentiable.send, differentiable.recv])
def test_tags_of_gradients_are_refused(call):
    with pytest.raises(ValueError, match=re.escape("from 0 to 16383")):
        call(torch.ones(1), NEXT, tag=1 << 14)
